"""An engine's reports of its memory and its steps, for people and programs."""


class Accounts:
    """Reports of ``Engine``; it has ``core``."""

    def memory_report(self):
        """{(tier, kind): (bytes held, peak bytes)}; kind "total" sums a tier."""
        return self.core.memory_report()

    def memory_forecast(self, tier="device"):
        """{kind: bytes, "total": bytes}: what the engine will hold at most on this rank's device, by
        ``memory_report()``'s kinds of the tier "device", once it has trained for some steps. ``tier="host"``: what it
        will hold of host memory for what is offloaded, staged, loaded and saved; ``tier="nvme"``: of drives.

        The engine runs for three steps on a device without memory, which takes milliseconds. Not collective: any rank
        may call it alone. The numbers do not contain the model's activations, its gradients before they reach the
        engine, and the memory of torch and the collectives. "gradients" are an upper bound: reductions that end early
        hold less, and so does an order within a block that completes units one after the other.
        """
        return self.core.memory_forecast(tier)

    def record_steps(self, on=True):
        """Switches on (or off) the timing of steps that begin after this call, by the device's clock, for
        ``step_report()``. The device does not wait for the host; each step records some more events."""
        self.core.record_steps(on)

    def step_report(self, wait=True):
        """The report of this rank's last step, a dict; None before the first is over.

        ``step`` is its number, and ``seconds`` the time from its first forward to the end of its update. ``transfers``
        has a dict for each of "gather", "reduce" and "refresh" (lazy all-gathers of units that stay whole): ``count``;
        ``bytes`` of whole units; ``seconds`` in which a transfer was under way; ``exposed_seconds``, in which the
        device only waited for one; ``gb_per_s`` of this rank's link. The report's ``exposed_seconds`` is that of all
        transfers. ``uses`` counts uses of sharded units that were "kept" since the last use, "prefetched", or gathered
        "late". ``device_allocations`` counts the engine's allocations in the step. ``host_waits`` counts the host waits
        of the engine in the step: the host waited for the device, and queued no work; 0 on the CPU. ``device_memory``
        is {kind: {``bytes`` now, ``peak_bytes``}}. Further seconds are ``forward_seconds``, ``backward_seconds``,
        ``update_seconds`` and its parts ``norm_seconds`` and ``optimizer_seconds``. All seconds but ``seconds`` and
        those of drives are None unless the step was timed (``record_steps``, ``strata.trace``).

        ``offload`` is None where nothing is offloaded, else a dict. Its ``links`` has a dict for "up" (host to device)
        and "down", where host and device have separate memory, and for "read" and "write" of drives, where there are
        any: ``bytes`` in the step; ``seconds`` in which the link was busy; ``gb_per_s`` in these; ``limit_gb_per_s``,
        from a short measurement; ``of_limit``, the fraction of it that was reached. ``fetch_wait_seconds`` is the
        host's wait for drives, ``copy_wait_seconds`` the device's wait for copies. ``parts`` counts the leased parts of
        states and weights, ``parts_ready`` those of them that were in memory. ``drives`` is [{``folder``,
        ``written_bytes`` to it since the start}]. A value that is not known is None.

        Args:
            wait: wait until the device has finished the last step. With offloading the first call takes some tenths of
                a second more, to measure the links' limits. False: the report is of the last finished step; None if
                there is none.
        """
        return self.core.step_report(wait)

    def print_step_report(self):
        """``step_report()`` as a table, on standard error, with ``memory_forecast()`` beside the held bytes."""
        report = self.step_report()
        if report is None:
            return
        forecast = self.memory_forecast()
        for kind, entry in report["device_memory"].items():
            entry["forecast_bytes"] = forecast[kind]
        from .step_view import print_table  # only when it is used
        print_table(report)
