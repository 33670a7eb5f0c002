"""The energy of a card that was never measured: that of a measured one, scaled by the power limits.

A card that does the same share of its peak draws the same share of its power limit: a choice that no measurement of another
card backs. So powers scale with the limit, the energy of an operation with the limit over the peak that computes it, and the
energy of a byte with the limit over the bandwidth.
"""

from __future__ import annotations

from hase.learned.energy import BYTES, OPERATIONS, EnergyModel, FittedEnergy, kind_of_work
from hase.records.gpu_catalogue import Gpu

PRODUCTS = (f"{OPERATIONS}:convolution", f"{OPERATIONS}:product")  # the tensor cores do them, where a card has any


def scaled(learned: EnergyModel, base: Gpu, gpu: Gpu) -> EnergyModel:
    """What was learned of the base card's energy, for another card."""
    limits = gpu.power_w / (learned.limit_w or base.power_w)

    def times(name: str) -> float:
        kind = kind_of_work(name)
        if kind == BYTES:
            return limits * base.bandwidth_gb_s / gpu.bandwidth_gb_s
        if kind == OPERATIONS and name in PRODUCTS:
            return limits * base.peak_tflop_s("float16") / gpu.peak_tflop_s("float16")
        return limits * base.fp32_tflop_s / gpu.fp32_tflop_s if kind == OPERATIONS else limits

    def of_model(model: FittedEnergy) -> FittedEnergy:
        return model.model_copy(update={"power_w": limits * model.power_w})

    return learned.model_copy(update={
        "limit_w": gpu.power_w, "idle_w": limits * learned.idle_w, "models": tuple(map(of_model, learned.models)),
        "coefficients": {name: times(name) * value for name, value in learned.coefficients.items()}, "scaled_from": base.name})
