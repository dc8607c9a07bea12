"""Building blocks of models in torch: norms, rotary, linears, paged attention. They know nothing of requests."""
