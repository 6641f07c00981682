"""Training runs of models that torch.compile compiles, and what it made of them."""

import torch
from tiny_models import full_parameters, loss_of, make_batches, make_engine, rank_and_world

STEPS = 4


class Graphs:
    """A backend that counts what it compiles. Blocks share one object: another backend would be another graph."""

    def __init__(self, then="aot_eager"):
        self.made, self.then = 0, torch._dynamo.lookup_backend(then)

    def __call__(self, graph, inputs):
        self.made += 1
        return self.then(graph, inputs)


def compile_blocks(model, backend, fullgraph=True):
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=fullgraph)


def train(make, config, backend=None, before=compile_blocks, after=None, recompiles=False, evaluate=()):
    """(losses of this rank, weights, breaks) after STEPS steps; ``backend`` None: without compiling.

    Args:
        make, config: a function that makes the model, and the engine's configuration.
        before, after: ``before(model, backend)`` before initialize; else ``after(engine, backend)`` after it.
        recompiles: whether the second step and later ones may make graphs.
        evaluate: contexts in which the model is evaluated after the first step; their losses follow the others.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    rank, world = rank_and_world()
    model = make()
    if backend is not None and after is None:
        before(model, backend)
    engine = make_engine(model, config)
    if backend is not None and after is not None:
        after(engine, backend)
    losses, others = [], []
    accumulation = config["gradient_accumulation_steps"]
    for number, tokens in enumerate(make_batches(STEPS * accumulation, world)):
        with torch.compiler.set_stance("default" if recompiles or number < accumulation else "fail_on_recompile"):
            loss = loss_of(engine, tokens[rank])
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        for context in evaluate if number == 0 else ():
            with context():
                others.append(loss_of(engine, tokens[rank]).item())
    weights = full_parameters(engine.module)
    engine.destroy()
    return losses + others, weights, dict(torch._dynamo.utils.counters["graph_break"])
