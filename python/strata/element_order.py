"""The elements of a parameter in the engine's order, which is that of its memory: a convolution's weight in torch's
channels_last has its channels innermost."""


def shaped(core, index, flat):
    """All elements of a parameter in its shape: a view."""
    shape = core.full_shape(index)
    if not core.channels_last(index):
        return flat.view(shape)
    images, channels, *places = shape
    return flat.view(images, *places, channels).movedim(-1, 1)


def flattened(core, index, value):
    """The inverse: a view where ``value`` has the parameter's memory format, else a copy."""
    return (value.movedim(1, -1) if core.channels_last(index) else value).reshape(-1)
