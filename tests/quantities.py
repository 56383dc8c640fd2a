"""What is compared with the golden values, on every device."""

import torch

from bmrs import TruncatedLogNormal, evidence

RELATIVE = {torch.float64: 1e-6, torch.float32: 1e-5}
QUANTITIES = {
    "kl": TruncatedLogNormal.kl,
    "mean": TruncatedLogNormal.mean,
    "log_mean": TruncatedLogNormal.log_mean,
    "snr": TruncatedLogNormal.snr,
    "delta_f_spike": evidence.spike,
    "delta_f_range_p1_8": lambda q: evidence.interval(q, p1=8),
    "delta_f_range_p1_4": lambda q: evidence.interval(q, p1=4),
}


def grid(dtype):
    mu, log_sigma = torch.meshgrid(torch.linspace(-60, 20, 801), torch.linspace(-10, 5, 301), indexing="ij")
    return mu.to(dtype).flatten().requires_grad_(), log_sigma.to(dtype).flatten().requires_grad_()
