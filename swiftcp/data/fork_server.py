"""Imported by the fork server of the data workers alone, which must outlive the SIGTERM that schedulers send to every process of a job:
its workers end with it. It ends by itself with the process that started it."""

import logging
import signal

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # tells at each import that there is no CUDA
signal.signal(signal.SIGTERM, signal.SIG_IGN)
