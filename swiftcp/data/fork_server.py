"""Imported by the fork server of the data workers alone, which must outlive the SIGTERM that schedulers send to every process of a job:
its workers end with it. It ends by itself with the process that started it."""

import signal

signal.signal(signal.SIGTERM, signal.SIG_IGN)
