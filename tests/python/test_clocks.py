"""Names of DeepSpeed's engine for times and metrics."""

import pytest
from tiny_models import config_of, make_batches, make_engine, make_model, train_step


def test_a_scripts_own_timers_count():
    engine = make_engine(make_model(), config_of(2))
    timer = engine.timers("load")
    assert engine.timers("load") is timer and engine.timers.has_timer("load") and not engine.timers.has_timer("x")
    timer.start()
    with pytest.raises(RuntimeError, match=r"'load' has been started; stop\(\) it first"):
        timer.start()
    assert timer.elapsed(reset=False) > 0.0
    timer.stop()
    with pytest.raises(RuntimeError, match=r"'load' is not running; start\(\) it first"):
        timer.stop()
    once = timer.elapsed(reset=False)
    timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) > once > 0.0
    mean = timer.mean()
    assert engine.timers.get_mean(["load", "x"], normalizer=2.0) == {"load": mean / 2.0}
    assert timer.elapsed() == timer.mean() == 0.0 and engine.timers.get_timers() == {"load": timer}
    engine.destroy()


def test_throughput_is_counted_from_the_second_step_on():
    engine = make_engine(make_model(), config_of(2, accumulation=2))
    clock = engine.tput_timer
    for step, tokens in enumerate(make_batches(8, 1)):
        assert (clock.avg_samples_per_sec() > 0.0) is (step >= 6)
        clock.start()
        train_step(engine, tokens[0])
        clock.stop(global_step=True)
    assert clock.global_step_count == 4
    assert clock.avg_samples_per_sec() == 2 * 8 / clock.total_elapsed_time
    engine.destroy()
