"""The arguments that say which pods: the same for ``exporter`` and ``status``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from vllm_spans.exporter.kube import KubernetesSource, client_maker
from vllm_spans.exporter.pods import PortRule
from vllm_spans.exporter.targets import Source, StaticSource, TargetError

DEFAULT_SELECTOR = "app.kubernetes.io/name=vllm-spans"


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments.

    Args:
        parser: The command's parser.
    """
    rule = PortRule()
    servers = parser.add_argument_group("servers without Kubernetes")
    servers.add_argument(
        "--target",
        action="append",
        metavar="URL",
        default=[],
        help="address of a server, http://HOST:PORT; may be repeated",
    )
    servers.add_argument(
        "--targets-file",
        type=Path,
        metavar="FILE",
        help="file of such addresses, one a line; read again when it changes",
    )
    pods = parser.add_argument_group("pods of a Kubernetes cluster")
    pods.add_argument(
        "--namespace",
        action="append",
        metavar="NAME",
        default=[],
        help="namespace of the pods; may be repeated (default: that of the credentials)",
    )
    pods.add_argument("--all-namespaces", action="store_true", help="pods of every namespace")
    pods.add_argument(
        "--selector",
        metavar="LABELS",
        default=DEFAULT_SELECTOR,
        help="label selector of the pods (default: %(default)s)",
    )
    pods.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="credentials (default: those of the pod that this runs in, else ~/.kube/config)",
    )
    pods.add_argument("--context", metavar="NAME", help="context in that file")
    pods.add_argument(
        "--port-annotation",
        metavar="NAME",
        default=rule.annotation,
        help="annotation of a pod that holds its port (default: %(default)s)",
    )
    pods.add_argument(
        "--port-name",
        metavar="NAME",
        default=rule.port_name,
        help="name of the container's port, for pods without that annotation (default: %(default)s)",
    )
    pods.add_argument(
        "--port",
        type=port,
        metavar="NUMBER",
        default=rule.port,
        help="port of pods that have neither (default: %(default)s)",
    )


def has_static_targets(args: argparse.Namespace) -> bool:
    """Whether servers are named, so that no cluster is asked."""
    return bool(args.target or args.targets_file)


def has_cluster_arguments(args: argparse.Namespace) -> bool:
    """Whether an argument says something of pods in a cluster."""
    rule = PortRule()
    unsaid = {
        "namespace": [],
        "all_namespaces": False,
        "selector": DEFAULT_SELECTOR,
        "kubeconfig": None,
        "context": None,
        "port_annotation": rule.annotation,
        "port_name": rule.port_name,
        "port": rule.port,
    }
    return any(getattr(args, name) != value for name, value in unsaid.items())


def make_source(
    args: argparse.Namespace, on_event: Callable[[str], None], on_failure: Callable[[str], None]
) -> Source:
    """What finds the targets that the arguments ask for.

    Args:
        args: Parsed arguments of ``add_source_arguments``.
        on_event: See ``KubernetesSource``.
        on_failure: See ``KubernetesSource``.

    Raises:
        TargetError: They contradict each other, or cannot be used; the text says what to change.
    """
    if has_static_targets(args):
        if has_cluster_arguments(args):
            raise TargetError(
                "give either servers (--target, --targets-file) or what chooses pods of a cluster (--namespace, "
                "--selector, --port and the like)"
            )
        return StaticSource(args.target, args.targets_file)
    if args.namespace and args.all_namespaces:
        raise TargetError("give either --namespace or --all-namespaces")
    make_client, own = client_maker(args.kubeconfig, args.context)
    namespaces = [] if args.all_namespaces else list(dict.fromkeys(args.namespace or [own]))
    rule = PortRule(args.port_annotation, args.port_name, args.port)
    return KubernetesSource(make_client, namespaces, args.selector, rule, on_event, on_failure)


def port(text: str) -> int:
    """Number of a port.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if text.isdecimal() and 0 < int(text) < 65536:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no port")


def seconds(text: str) -> float:
    """A length of time.

    Raises:
        argparse.ArgumentTypeError: It is not a positive number.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if 0 < value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")


def count(text: str) -> int:
    """A positive whole number.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
