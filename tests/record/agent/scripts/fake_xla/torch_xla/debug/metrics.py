"""The public names of what the compiled part has."""

import torch_xla


def metric_data(name):
    return torch_xla._XLAC._xla_metric_data(name)


def counter_value(name):
    return torch_xla._XLAC._xla_counter_value(name)


def clear_all():
    torch_xla._XLAC.clear()
