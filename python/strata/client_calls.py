"""Passes calls of the optimizer that a script gave to ``initialize`` on to the engine's."""

import types
import weakref


def send_calls_to(sharded, client):
    """Lets scripts call ``step()`` and ``zero_grad()`` of the optimizer that they gave to ``initialize``."""
    if "step" in vars(client):
        return  # a scheduler has wrapped step(), and checks that its wrapper is still there
    own, there, mine = type(client).step, weakref.ref(sharded), weakref.ref(client)

    def step(_, closure=None):
        sharded = there()
        if sharded is None or not sharded.trains():
            return own(mine(), *(() if closure is None else (closure,)))
        return sharded.step(closure)

    def zero_grad(_, set_to_none=True):
        sharded = there()
        if sharded is None or not sharded.trains():
            type(mine()).zero_grad(mine(), set_to_none)
        else:
            sharded.zero_grad(set_to_none)

    # Methods, which schedulers can wrap; the proxy avoids a reference cycle.
    client.step = types.MethodType(step, weakref.proxy(client))
    client.zero_grad = types.MethodType(zero_grad, weakref.proxy(client))
