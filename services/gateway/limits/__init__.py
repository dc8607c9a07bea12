"""What tenants may use: rates, requests at a time, budgets. `contract` is all that the rest of the gateway sees.

`limiter` lets requests in, `hold` is what one has taken, `local` decides while Redis is away, `estimate` says how long
answers will be, `ledger` settles what was used, `journal` keeps it until Redis has it, `usage` exports it. What all
gateways share is in `kvmesh.store.limits`.
"""
