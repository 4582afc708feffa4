"""Answers questions about a training before it runs: `hf_ckpt.predict`, `hf-ckpt plan`, `hf-ckpt app`.

`forecast` answers a `Question` with a `Forecast`. `result` has this record, its sentences and the lines to copy. The
console and the page show it.
"""
