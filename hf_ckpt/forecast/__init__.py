"""Answers questions about a training before it runs: `hf_ckpt.predict`, `hf-ckpt plan`, `hf-ckpt app`.

`forecast` answers a `prediction.question.Question`. If nothing fits, `nearest` finds settings that do. `words` and
`answers` turn both into sentences and tables. `text` prints these on a console, and `html` writes them as a page, with
`figures`.
"""
