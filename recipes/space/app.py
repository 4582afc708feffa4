"""The page of `hf-ckpt app` as a Hugging Face Space. Files of the Space's machine are not read."""

from hf_ckpt.cli.app import LOOK, build

demo = build(paths=False)

if __name__ == "__main__":
    demo.launch(**LOOK)
