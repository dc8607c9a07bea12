"""What the gateway tells its callers by, from its settings."""

from __future__ import annotations

from kvmesh.config import GatewaySettings
from kvmesh.errors import FailedPrecondition
from kvmesh.identity.tokens import JwtTokens
from kvmesh.rpc.credentials import Credentials
from kvmesh.store.apikeys import RedisKeys
from kvmesh.store.client import RedisStore


def credentials_of(settings: GatewaySettings, redis: RedisStore | None, *, proven: bool) -> Credentials:
    """The sources that the settings name. `proven`: the gateway proves to inner services who it is.

    Raises FailedPrecondition for settings that do not go together, OSError or ValueError for files that are unusable.
    """
    if settings.keys_in_redis and redis is None:
        raise FailedPrecondition("keys_in_redis needs redis_url")
    if not proven and (settings.credentials_file is not None or settings.keys_in_redis or settings.jwt.jwks):
        raise FailedPrecondition(
            "credentials_file, keys_in_redis and jwt.jwks need mesh_token_file or tls.cert: inner services believe a "
            "tenant only from a gateway that proves who it is"
        )
    return Credentials(
        settings.credentials_file,
        keys=RedisKeys(redis) if settings.keys_in_redis and redis is not None else None,
        tokens=JwtTokens(settings.jwt) if settings.jwt.jwks else None,
    )
