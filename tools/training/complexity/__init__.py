"""Training of the complexity classifier: labels, fitting, judging. Only numpy; the command is train_complexity.py."""
