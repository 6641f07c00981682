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

        Found by running the engine for three steps on a device without memory, in milliseconds; every rank may ask
        for itself. The model's activations, its gradients before they reach the engine, and what torch and the
        collectives keep for themselves come on top. "gradients" are an upper bound: reductions that end early hold
        less, and so does an order within a block that completes units one after the other.
        """
        return self.core.memory_forecast(tier)

    def record_steps(self, on=True):
        """Times the steps that begin after this call, by the device's clock, for ``step_report()``. The device does
        not wait for the host; each step records some more events."""
        self.core.record_steps(on)

    def step_report(self, wait=True):
        """The report of this rank's last step, a dict; None before the first is over.

        ``step``, its number, and ``seconds``, from its first forward to the end of its update. ``transfers``: for
        "gather", "reduce", and "refresh" (gathers of units that stay whole) a dict of ``count``; ``bytes`` of
        whole units; ``seconds`` in which one was under way; ``exposed_seconds``, in which the device had nothing
        to do but wait for one; ``gb_per_s`` of this rank's link. ``exposed_seconds``: of all. ``uses`` of sharded
        units: "kept" since the last use, "prefetched", or fetched "late". ``device_allocations`` by the engine in
        the step. ``host_waits``: how often the engine had the host wait for the device in the step, and queue nothing
        meanwhile; 0 on the CPU. ``device_memory``: {kind: {``bytes`` now, ``peak_bytes``}}. ``offload``: below. Seconds
        other than ``seconds`` and those of drives, among them ``forward_seconds``, ``backward_seconds``,
        ``update_seconds`` and its parts ``norm_seconds`` and ``optimizer_seconds``, are None unless the step was timed
        (``record_steps``, ``strata.trace``).

        ``offload`` is None where nothing is offloaded, else a dict. ``links``: of "up" (host to device) and "down",
        where they are apart, and of "read" and "write" of drives, where there are any, a dict of ``bytes`` in the
        step; ``seconds`` in which something moved; ``gb_per_s`` in these; ``limit_gb_per_s``, which a short measurement
        found; ``of_limit``, the part of it that was reached. ``fetch_wait_seconds``, which the host waited for drives,
        and ``copy_wait_seconds``, which the device waited for copies. ``parts`` of states and weights that were lent,
        and how many of them were in memory (``parts_ready``). ``drives``: [{``folder``, ``written_bytes`` to it since
        the start}]. A value that is not known is None.

        Args:
            wait: for the device to finish the last step, and the first time, where something is offloaded, some
                tenths of a second to measure the links' limits; False: the report is of the last one that it has
                finished, None if there is none.
        """
        return self.core.step_report(wait)

    def print_step_report(self):
        """``step_report()`` as a table, on standard error, with ``memory_forecast()`` beside what is held."""
        report = self.step_report()
        if report is None:
            return
        forecast = self.memory_forecast()
        for kind, entry in report["device_memory"].items():
            entry["forecast_bytes"] = forecast[kind]
        from .step_view import print_table  # only when it is used
        print_table(report)
