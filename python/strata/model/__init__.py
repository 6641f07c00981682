"""A user's torch.nn.Module as the engine sees it: its description, the owners of its parameters, its device."""
