"""For the Python processes that tests start: garbage is looked for seldom, most of all while PyTorch is imported."""

import gc

gc.set_threshold(100_000, 20, 100)
