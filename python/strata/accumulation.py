"""Which backward passes make one step of the engine, and when their gradients are reduced."""

from contextlib import contextmanager

from . import _C


class Accumulation:
    """What ``Engine`` says of micro-steps.

    Attributes:
        coalesces: whether a ``coalesce_grad_reduction()`` is open.
    """

    coalesces = False
    _left_out = ()  # trainable parameters that the optimizer does not have; autograd makes their .grad

    def zero_grad(self, set_to_none=True):
        """Drops the gradients of the step so far, of all micro-steps, as in torch: reduced or not, wherever they are.
        After ``step()`` there are none. On this rank; what was reduced has to be dropped on every rank.

        Args:
            set_to_none: False: they become zeroes, with which ``step()`` still updates.

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
        """Decides whether the next ``step()`` updates the weights, for all steps until it is set again; None: count
        micro-steps again."""
        self.core.set_boundary(is_boundary)

    @contextmanager
    def no_sync(self):
        """Context in which nothing is reduced: gradients stay on this rank, whole and in the reduce dtype, until the
        next reduction. Unlike DeepSpeed's, it works at every stage."""
        self.core.set_synchronise(False)
        try:
            yield
        finally:
            self.core.set_synchronise(True)

    @contextmanager
    def coalesce_grad_reduction(self):
        """Context of several backward passes whose gradients are reduced once, at the ``step()`` that follows: as
        ``no_sync()``, in which ``step()`` is an error."""
        if self.coalesces:
            raise _C.UsageError("coalesce_grad_reduction() was entered within itself; leave the inner block out")
        self.coalesces = True
        try:
            with self.no_sync():
                yield
        finally:
            self.coalesces = False
