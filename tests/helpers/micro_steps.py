"""What users do in the micro-steps of a step, and between its backward and the step of its optimizer."""

import contextlib
import threading

import pytest
import torch
from torch.optim import optimizer as optimizers

import hf_ckpt
from helpers.steps import enable, gradients, without_cache
from hf_ckpt import compat
from hf_ckpt.measure.live import LiveBytes
from hf_ckpt.models.blocks import base_model, find_blocks
from hf_ckpt.models.tiny import tiny_batch, tiny_model

LAYERS, HIDDEN, ROWS, LONGEST = 4, 32, 2, 64


class Stopped(Exception):
    """Raised on purpose in a forward or a backward."""


class Interrupted(KeyboardInterrupt):
    """As Ctrl-C."""


@contextlib.contextmanager
def alone():
    """Hide this from the hooks of the process on optimizers: a session counts what any optimizer uses, as a device
    does."""
    hooks = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    before = [dict(of_kind) for of_kind in hooks]
    for of_kind in hooks:
        of_kind.clear()
    yield
    for of_kind, kept in zip(hooks, before, strict=True):
        of_kind.update(kept)


def disable(model):
    getattr(base_model(model), compat.transformers.DISABLE_NAMES[-1])()


def blocks_of(model):
    return [*find_blocks(model).modules.values()]


class Counted(LiveBytes):
    """Counts operations, too."""

    operations = 0

    def __torch_dispatch__(self, *args):
        Counted.operations += 1
        return super().__torch_dispatch__(*args)


class OperationClock:
    """Takes the place of a clock: an operation takes a microsecond, so that what keeps more is faster in every run."""

    def __init__(self, devices):
        pass

    def stamp(self):
        return Counted.operations

    def between(self, first, last):
        return 1000 * (last - first)


class Run:
    """A model in training, its optimizer, and what its last step needed."""

    def __init__(self, family, dropout, make_optimizer, spec=None):
        self.family = family
        layers = LAYERS // 2 if family == "t5" else LAYERS  # of each stack
        self.model = tiny_model(family, layers=layers, hidden=HIDDEN, dropout=dropout, attention="sdpa")
        self.make = make_optimizer
        self.make_optimizer()
        self.live = None
        """Counts the bytes of the step that runs."""
        self.peak_bytes = 0
        self.seed = 0
        self.abandoned = None
        """A loss whose graph lives until the next forward has ended."""
        self.has_plan = spec is not None
        if self.has_plan:
            hf_ckpt.install(self.model, spec)
            enable(self.model)

    def make_optimizer(self, whole=True):
        """A new optimizer, of all that is trained, or of all but the embeddings."""
        apart = set() if whole else set(self.model.get_input_embeddings().parameters())
        trained = [p for p in self.model.parameters() if p.requires_grad and p not in apart]
        self.optimizer = self.make(trained)
        self.apart = [parameter for parameter in apart if parameter.requires_grad]

    def batch(self, tokens):
        return without_cache(self.model, tiny_batch(self.family, batch=ROWS, tokens=tokens, seed=self.seed))

    def loss(self, tokens):
        """The loss of one forward."""
        loss = self.model(**self.batch(tokens)).loss
        self.abandoned = None
        return loss

    def discard_gradients(self):
        """After an exception, which gradients exist depends on the order of the backward."""
        self.model.zero_grad(set_to_none=True)

    def step(self, micro_steps, seed, between):
        """Train for a step of (what to do, tokens); returns the gradients of its last micro-steps."""
        for place, (work, tokens) in enumerate(micro_steps):
            self.seed = seed + place
            torch.manual_seed(self.seed)
            work(self, tokens)
        between(self)
        self.optimizer.step()
        result = gradients(self.model)
        self.model.zero_grad(set_to_none=True)
        return result

    def counted_step(self, *step):
        """The same, and count the most bytes alive in it."""
        with Counted(self.model, self.optimizer) as self.live:
            result = self.step(*step)
        self.peak_bytes = self.live.peak_bytes
        self.live = None
        return result


# --- micro-steps ------------------------------------------------------------------------------------------------------


def one_forward(run, tokens):
    run.loss(tokens).backward()


def two_forwards(run, tokens):
    (run.loss(tokens) + run.loss(tokens)).backward()


def detached_first(run, tokens):
    reference = run.loss(tokens).detach()
    (run.loss(tokens) + reference).backward()


def detached_last(run, tokens):
    loss = run.loss(tokens)
    (loss + run.loss(tokens).detach()).backward()


def with_reference(run, tokens):
    with torch.no_grad():
        reference = run.loss(tokens)
    (run.loss(tokens) + reference).backward()


def early_exit(run, tokens):
    """The loss is on a hidden state in the middle, and all others are alive."""
    output = run.model(**run.batch(tokens), output_hidden_states=True)
    states = output.get("hidden_states", output.get("decoder_hidden_states"))
    loss = states[len(states) // 2].square().mean()
    if loss.requires_grad:  # blocks below may be frozen
        loss.backward()


def without_backward(run, tokens):
    for _ in range(3):
        run.loss(tokens)


def retained(run, tokens):
    loss = run.loss(tokens)
    loss.backward(retain_graph=True)
    loss.backward()


def accumulated(run, tokens):
    for length in (tokens, max(4, tokens // 2)):
        run.loss(length).backward()


def by_hand(run, tokens):
    """Gradients that `autograd.grad` returns."""
    trained = [parameter for parameter in run.model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(
        trained, torch.autograd.grad(run.loss(tokens), trained, allow_unused=True), strict=True
    ):
        parameter.grad = gradient


def evaluated_before_backward(run, tokens):
    loss = run.loss(tokens)
    evaluated(run)
    loss.backward()


def abandoned(run, tokens):
    """As Ctrl-C before the backward in a notebook, which keeps the graph."""
    run.abandoned = run.loss(tokens)


def _raise(error):
    def hook(*_):
        raise error

    return hook


def raises_in_forward(run, tokens, error=Stopped):
    part = next(part for part in blocks_of(run.model)[1].modules() if not [*part.children()])
    handle = part.register_forward_hook(_raise(error))
    with pytest.raises(error):
        run.loss(tokens)
    handle.remove()
    run.discard_gradients()


def interrupted(run, tokens):
    raises_in_forward(run, tokens, Interrupted)


def raises_in_second_forward(run, tokens):
    loss = run.loss(tokens)
    handle = blocks_of(run.model)[1].register_forward_hook(_raise(Stopped))
    with pytest.raises(Stopped):
        run.loss(tokens)
    handle.remove()
    loss.backward()


def raises_in_backward(run, tokens):
    output = run.model(**run.batch(tokens))
    loss = output.loss
    output.logits.register_hook(_raise(Stopped))
    del output  # held, its logits need more than in other steps; a step with an error shows that to nobody
    with pytest.raises(Stopped):
        loss.backward()
    run.discard_gradients()


def in_a_thread(run, tokens):
    """The forward runs in a thread of its own, as under `torch.nn.DataParallel`."""
    losses = []

    def forward():
        with contextlib.nullcontext() if run.live is None else counting_here(run.live):
            losses.append(run.loss(tokens))

    worker = threading.Thread(target=forward)
    worker.start()
    worker.join()
    losses.pop().backward()


@contextlib.contextmanager
def counting_here(live):
    """Modes that see every operation are on in one thread only."""
    compat.modes.enter_dispatch_mode_below(live)
    yield
    compat.modes.leave_dispatch_mode(live)


MICRO_STEPS = [
    one_forward,
    two_forwards,
    detached_first,
    detached_last,
    with_reference,
    early_exit,
    without_backward,
    retained,
    accumulated,
    by_hand,
    evaluated_before_backward,
    abandoned,
    raises_in_forward,
    interrupted,
    raises_in_second_forward,
    raises_in_backward,
    in_a_thread,
]
SURPRISES = {two_forwards, detached_last, early_exit, raises_in_second_forward}
"""What begins as a step with one forward, and needs more than that."""
UNMEASURED = {retained, evaluated_before_backward, abandoned}
"""What plans of other steps have no room for: a graph that lives until a second backward, an evaluation, or the next
step. Nothing but the next check of the peak tells such a step from others."""


# --- between backward and the optimizer's step ------------------------------------------------------------------------


def nothing(run):
    pass


def evaluated(run):
    modes = {module: module.training for module in run.model.modules()}
    run.model.eval()
    with torch.no_grad():
        run.loss(LONGEST)
    for module, mode in modes.items():
        module.training = mode


def paused(run):
    with hf_ckpt.paused(run.model) if run.has_plan else contextlib.nullcontext(), torch.no_grad():
        run.loss(LONGEST // 2)


def disabled(run):
    if run.has_plan:
        disable(run.model)
        enable(run.model)


def clipped(run):
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def skipped(run):
    """A step that a gradient scaler skips."""
    run.model.zero_grad(set_to_none=True)


def loaded(run):
    """The weights of a checkpoint, which is the model's own."""
    run.model.load_state_dict({name: value.clone() for name, value in run.model.state_dict().items()})


BETWEEN = [nothing, evaluated, paused, disabled, clipped, skipped, loaded]
