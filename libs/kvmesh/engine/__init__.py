"""The inference engine: sequences, scheduler, runners, sampler. Its core imports no torch."""
