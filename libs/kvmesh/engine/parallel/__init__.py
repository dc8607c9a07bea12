"""Tensor parallel on one host: the worker process is rank 0 and leads, its child processes are the other ranks.

`ranks` starts and watches the processes, `wire` is what the leader says to them, `runner` is the leader's `Runner`,
`rank` the program of the others. Only the last two import torch.
"""
