"""A model's attributes and hooks as a value that can be compared later."""


def snapshot(model):
    """`vars()` of every module, with copies of its dicts (parameters, buffers, hooks)."""
    return {
        name: {key: dict(value) if isinstance(value, dict) else value for key, value in vars(module).items()}
        for name, module in model.named_modules()
    }
