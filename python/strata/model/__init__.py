"""A user's torch.nn.Module as the engine sees it: its description, who owns its parameters, where it lies."""
