"""The nvlink transport: a prefill engine that writes into a decode engine's GPU memory by itself ."""
