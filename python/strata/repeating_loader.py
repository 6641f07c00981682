"""An endless data loader."""


class RepeatingLoader:
    """Iterates over ``loader`` again and again. Raises StopIteration where ``loader`` is empty."""

    def __init__(self, loader):
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self):
        return self

    def __next__(self):
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)

    def __len__(self):
        return len(self.loader)
