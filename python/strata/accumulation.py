"""Which backward passes make one step of the engine, and when their gradients are reduced."""

from contextlib import contextmanager

from . import _C


class Accumulation:
    """The part of ``Engine`` that concerns micro-steps.

    Attributes:
        coalesces: whether a ``coalesce_grad_reduction()`` is open.
    """

    coalesces = False
    _left_out = ()  # trainable parameters that are in no param group; autograd makes their .grad

    def zero_grad(self, set_to_none=True):
        """Drops the gradients of all micro-steps of this step, as in torch: reduced or not, in every tier. After
        ``step()`` there are none. The call acts on this rank; every rank must drop gradients that were reduced.

        Args:
            set_to_none: False: the gradients become zeroes, and ``step()`` still updates with them.

        Raises:
            UsageError: within a backward pass. ``step()`` raises it where ranks have dropped different gradients.
        """
        _C.zero_gradients(self.core, not set_to_none)
        for parameter in self._left_out:
            parameter.grad = None

    def is_gradient_accumulation_boundary(self):
        """Whether the next ``step()`` updates the weights."""
        return self.core.at_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary):
        """Decides whether ``step()`` updates the weights. The value holds until the next call of this method; None:
        the engine counts micro-steps again."""
        self.core.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self):
        """Context in which the engine reduces nothing: gradients stay on this rank, whole and in the reduce dtype,
        until the next reduction. Unlike DeepSpeed's, it works at every stage."""
        self.core.set_synchronise(False)
        try:
            yield
        finally:
            self.core.set_synchronise(True)

    @contextmanager
    def coalesce_grad_reduction(self):
        """Context of several backward passes whose gradients the engine reduces once, in the ``step()`` after the
        context. It acts as ``no_sync()``; ``step()`` within it is an error."""
        if self.coalesces:
            raise _C.UsageError("coalesce_grad_reduction() was entered within itself; leave the inner block out")
        self.coalesces = True
        try:
            with self.no_sync():
                yield
        finally:
            self.coalesces = False
