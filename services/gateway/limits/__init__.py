"""What tenants may use: rates, requests at a time, budgets. `contract` is all that the rest of the gateway sees."""
