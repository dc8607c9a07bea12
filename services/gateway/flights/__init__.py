"""Flights: one generation for identical requests that run at the same time, over all gateways.

`hub` has the flights of this gateway, `flight` the states of one, `log` what it has put out and who reads it,
`publisher` and `mirror` its frames out and in, `produce` the generation that feeds it, `kvmesh.store.flights` Redis.
"""

from services.gateway.flights.flight import Flight
from services.gateway.flights.hub import Flights
from services.gateway.flights.log import FlightLog, Opened, Reader
from services.gateway.flights.parts import Member, Pace, Produce, Role

__all__ = ["Flight", "FlightLog", "Flights", "Member", "Opened", "Pace", "Produce", "Reader", "Role"]
