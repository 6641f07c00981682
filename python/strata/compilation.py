"""torch.compile of the model under an engine: ``engine.compile()``."""

from . import _C

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")  # modes of torch.compile


class Compilation:
    """The part of ``Engine`` that uses torch.compile."""

    is_compiled = False  # bool: whether ``compile()`` was called

    def compile(self, backend=None, compile_kwargs=None, schedule=None, compiled_autograd_enabled=False):
        """Compiles the module's forward, as ``torch.nn.Module.compile`` does, at its first call. The losses equal those
        of the model that is not compiled, where the backend's kernels round in the same way.

        The engine's hooks stay out of graphs. At stages 0 to 2 each block is a graph, or several where its code breaks
        it. At stage 3 a read of a sharded parameter ends a graph, so torch compiles the code between two reads.
        The module stays compiled when the engine is destroyed.

        Args:
            backend: of torch.compile, a name or a function. None: "inductor".
            compile_kwargs: dict, more arguments of torch.compile.
            schedule: None; Strata does not offer DeepCompile's passes.
            compiled_autograd_enabled: False; compiled autograd cannot trace the engine's hooks, which are C++.

        Raises:
            UsageError: for ``fullgraph`` and for CUDA graphs, which the engine's hooks do not allow.
            NotImplementedError: for the last two arguments.
        """
        if schedule is not None:
            raise NotImplementedError("engine.compile: DeepCompile's passes are not offered; leave schedule out")
        if compiled_autograd_enabled:
            raise NotImplementedError("engine.compile: compiled autograd cannot trace the engine's hooks; leave "
                                      "compiled_autograd_enabled out")
        arguments = dict(compile_kwargs or {})
        arguments.pop("backend", None)  # as in DeepSpeed the other argument counts
        _require_allowed(arguments)
        self.module.compile(backend=backend or "inductor", **arguments)
        self.is_compiled = True


def _require_allowed(arguments):
    if arguments.get("fullgraph"):
        raise _C.UsageError("engine.compile: the engine's hooks run between graphs, so a model is more than one; leave "
                            "fullgraph out")
    options = arguments.get("options") or {}
    if arguments.get("mode") in _WITH_CUDA_GRAPHS or options.get("triton.cudagraphs"):
        raise _C.UsageError("engine.compile: CUDA graphs would keep addresses of weights that the engine moves; write "
                            "mode \"default\" or \"max-autotune-no-cudagraphs\", and no \"triton.cudagraphs\"")
