"""A click parameter type for the address of a server."""

from __future__ import annotations

import click


class Address(click.ParamType[str]):
    """HOST:PORT, or a URI that gRPC resolves."""

    name = "HOST:PORT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Fails if gRPC cannot resolve an address of this form."""
        from penstock.wire.channel import check_target

        address = str(value)
        try:
            check_target(address)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return address
