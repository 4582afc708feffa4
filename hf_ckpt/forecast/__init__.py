"""Answers what is asked about a training before it runs: `hf_ckpt.predict`, `hf-ckpt plan`, `hf-ckpt app`.

`forecast` answers a `prediction.question.Question`, and `nearest` finds what would fit where nothing does. `words` and
`answers` put both into sentences and tables. `text` prints these on a console, and `html` writes them as a page, with
`figures`.
"""
