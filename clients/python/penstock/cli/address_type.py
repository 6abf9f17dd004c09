"""The address of a server, as a command line gives it."""

from __future__ import annotations

import click


class Address(click.ParamType[str]):
    """HOST:PORT, or a URI that gRPC resolves."""

    name = "HOST:PORT"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Fails where it is none."""
        from penstock.wire.channel import check_target

        address = str(value)
        try:
            check_target(address)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return address
