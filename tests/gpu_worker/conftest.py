"""Settings of OpenMP, before anything imports torch: where tests share cores, threads that spin stop each other."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")
