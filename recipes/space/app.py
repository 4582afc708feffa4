"""The page of `hf-ckpt app` as a Hugging Face Space. Files of the Space's machine are not read."""

from hf_ckpt.cli.app import build, import_gradio, look

demo = build(paths=False)

if __name__ == "__main__":
    demo.launch(**look(import_gradio()))
