"""The page of `hf-ckpt app` as a Hugging Face Space."""

from hf_ckpt.cli.app import LOOK, build

demo = build()

if __name__ == "__main__":
    demo.launch(**LOOK)
