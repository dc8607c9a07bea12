"""Tensor parallel: the worker process is rank 0 and leads, its child processes are the other ranks; with several hosts,
each other host's agent starts and watches the ranks there.

`ranks` is the leader's hold on them, `process` one of them, `wire` what the leader says to them, `runner` and `ahead`
the leader's `Runner`, `rank` the program of the others. `hosts` lets agents in, `agent` is their side, `handshake` how
they prove themselves, `network` sockets and interfaces. Only `runner`, `ahead` and `rank` import torch.
"""
