"""Built-in hosts: networks that define the positions of their slots."""

from esper.kasmina.host import Host
from esper.kasmina.hosts.cnn import CNNHost, ResidualHost
from esper.kasmina.hosts.transformer import TransformerHost

HOSTS: dict[str, type[CNNHost] | type[ResidualHost] | type[TransformerHost]] = {
    "cnn": CNNHost,
    "residual": ResidualHost,
    "gpt": TransformerHost,
}
"""Classes of the built-in hosts, by the name that tasks use."""

__all__ = ["HOSTS", "CNNHost", "Host", "ResidualHost", "TransformerHost"]
