"""Answers questions about a training before it runs: `hf_ckpt.predict`, `hf-ckpt plan`, `hf-ckpt app`.

`forecast` answers a `Question` with a `Forecast`, the record of `answer`. If nothing fits, `nearest` finds what does.
`words` has the sentences and the lines to copy. The console, the `report` and the page show the record.
"""
