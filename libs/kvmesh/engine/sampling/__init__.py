"""Pieces of the sampler, in numpy: noise, logit processors, filters, log probabilities."""
