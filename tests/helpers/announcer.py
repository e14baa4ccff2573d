"""Announces ssh on the network, as a Mac with Remote Login does, until its stdin is closed. Its
arguments: the name of the machine, and the addresses of the machine."""

from __future__ import annotations

import sys

from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_ssh._tcp.local."


def main(name: str, *addresses: str) -> None:
    with Zeroconf() as network:
        network.register_service(
            ServiceInfo(
                SERVICE,
                f"{name}.{SERVICE}",
                port=22,
                server=f"{name}.local.",
                parsed_addresses=list(addresses),
            )
        )
        print("up", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
