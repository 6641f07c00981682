"""Writes golden.json: rates, momenta and loss scales of DeepSpeed's own classes.

    python tests/engine/schedule/make_golden.py tests/engine/schedule/golden.json

needs deepspeed==0.19.8 (installed with DS_BUILD_OPS=0, run with DS_ACCELERATOR=cpu). The schedules are stepped
600 times; every step of the first 30 and every 11th after that is kept. --all keeps every step.
"""

import json
import random
import sys

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.fp16 import loss_scaler

loss_scaler.dist.get_rank = lambda: 1  # no process group; rank 1 does not log

STEPS = 600
SCHEDULES = [
    ("WarmupLR", {}, [3e-4]),
    ("WarmupLR", {"warmup_min_lr": 1e-6, "warmup_max_lr": 3e-4, "warmup_num_steps": 20}, [1e-3]),
    ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 1}, [1e-3]),
    ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 50, "warmup_type": "linear"}, [1e-3, 2e-3]),
    ("WarmupLR", {"warmup_min_lr": [0.0, 1e-5], "warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 7}, [1.0, 1.0]),
    ("WarmupDecayLR", {"total_num_steps": 500}, [1e-3]),
    ("WarmupDecayLR", {"total_num_steps": 400, "warmup_min_lr": 1e-5, "warmup_max_lr": 6e-4, "warmup_num_steps": 40},
     [1e-3, 1e-2]),
    ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 12, "warmup_type": "linear"}, [1e-3]),
    ("WarmupCosineLR", {"total_num_steps": 500, "warmup_num_steps": 25}, [1e-3, 3e-3]),
    ("WarmupCosineLR", {"total_num_steps": 100, "warmup_min_ratio": 0.1, "warmup_num_steps": 9, "cos_min_ratio": 0.05,
                        "warmup_type": "linear"}, [2e-4]),
    ("WarmupCosineLR", {"total_num_steps": 4, "warmup_num_steps": 10}, [2e-4]),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 40}, [1e-3]),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 30, "cycle_second_step_size": 70,
                  "decay_step_size": 10, "decay_lr_rate": 0.05, "decay_mom_rate": 0.001}, [1e-3, 1e-4]),
    ("OneCycle", {"cycle_min_lr": [1e-4, 1e-5], "cycle_max_lr": [1e-3, 1e-2], "cycle_first_step_size": 21,
                  "cycle_second_step_size": 10, "cycle_first_stair_count": 3, "cycle_second_stair_count": 5,
                  "cycle_min_mom": 0.85, "cycle_max_mom": 0.95}, [1e-3, 1e-3]),
    ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 15, "cycle_second_step_size": 0,
                  "cycle_momentum": False, "decay_step_size": 7, "decay_lr_rate": 0.3}, [1e-3]),
    ("LRRangeTest", {}, [1e-3]),
    ("LRRangeTest", {"lr_range_test_min_lr": [1e-4, 1e-3], "lr_range_test_step_size": 30,
                     "lr_range_test_step_rate": 5.0, "lr_range_test_staircase": True}, [1e-3, 1e-3]),
]

SCALERS = [
    {"init_scale": 2.0**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2, "consecutive_hysteresis": False},
    {"init_scale": 2.0**8, "scale_window": 4, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False},
    {"init_scale": 2.0**10, "scale_window": 3, "min_scale": 4, "delayed_shift": 3, "consecutive_hysteresis": False},
    {"init_scale": 2.0**10, "scale_window": 3, "min_scale": 4, "delayed_shift": 3, "consecutive_hysteresis": True},
    {"init_scale": 48.0, "scale_window": 5, "min_scale": 10, "delayed_shift": 2, "consecutive_hysteresis": True},
]


def kept(step, keep_all):
    return keep_all or step < 30 or step % 11 == 0


def schedule_case(kind, params, group_lrs, keep_all):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in group_lrs]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    scheduler = getattr(lr_schedules, kind)(optimizer, **params)
    rows = []
    for step in range(-1, STEPS):
        if step >= 0:
            scheduler.step()
        if kept(step, keep_all):
            groups = optimizer.param_groups
            rows.append([step, [g["lr"] for g in groups], [g["betas"][0] for g in groups],
                         [g["betas"][1] for g in groups]])
    if not any(row[2] != rows[0][2] or row[3] != [0.999] * len(group_lrs) for row in rows):
        rows = [row[:2] for row in rows]  # the schedule leaves the momentum alone
    return {"type": kind, "params": params, "group_lrs": group_lrs, "rows": rows}


def scaler_case(args, seed):
    scaler = loss_scaler.DynamicLossScaler(**args)
    random.seed(seed)
    overflows, scales, raised = "", [], False
    rate = random.choice([0.1, 0.3, 0.6])
    for _ in range(120):
        overflow = random.random() < rate
        overflows += "x" if overflow else "."
        try:
            scaler.update_scale(overflow)
        except Exception:
            raised = True
            break
        scales.append(scaler.loss_scale)
    return {"args": args, "overflows": overflows, "scales": scales, "raised_at_end": raised}


def lines(cases):
    return ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)


def main():
    keep_all = "--all" in sys.argv
    schedules = [schedule_case(kind, params, lrs, keep_all) for kind, params, lrs in SCHEDULES]
    scalers = [scaler_case(args, seed) for seed, args in enumerate(SCALERS * 2)]
    path = next(arg for arg in sys.argv[1:] if arg != "--all")
    with open(path, "w") as file:  # DeepSpeed writes its log to standard output
        file.write('{"schedules": [\n%s\n],\n"scalers": [\n%s\n]}\n' % (lines(schedules), lines(scalers)))


if __name__ == "__main__":
    main()
