"""``send``, ``recv`` and their kin, with the sender's trace context on every message.

They are ``torch.distributed``'s own calls with the same arguments, on gloo and on NCCL. Both sides
must use them: a message of 4 KB that ``lens_contrib.nccl.send`` sends is 256 bytes longer than the
one that ``dist.recv`` expects, and gloo ends the process that receives too many bytes.

What is sent never depends on this process's tracing: without a span the frame says that there is
no context, and is of the same size.
"""

from __future__ import annotations

from collections.abc import Sequence

from lens_contrib.nccl.channels import RECEIVING, SENDING, peer_channels
from lens_contrib.nccl.messages import TensorMessage
from lens_contrib.nccl.ops import CarrierWork, RecvOp, SendOp
from lens_contrib.nccl.transports import Mode, auto_mode, transport_of
from lens_contrib.torch.compat import default_group
from lens_contrib.torch.process_groups import member_group
from lens_core.carrier import Carrier
from lens_core.errors import MissingExtraError, PeerRankError
from lens_core.frame import MAX_SEQUENCE

try:
    import torch
    import torch.distributed as dist
except ImportError as error:
    raise MissingExtraError("torch", "torch") from error

__all__ = ["batch_isend_irecv", "irecv", "isend", "recv", "send"]


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    mode: Mode = "auto",
) -> None:
    """Send a tensor and the current trace context; returns when the tensor may be changed.

    Never waits for the device: on CUDA the frame is copied there from pinned memory, in stream
    order.

    Args:
        tensor: Dense and contiguous, on a device that the group moves.
        dst: Global rank of the receiver.
        group: Process group; the default one if not given.
        tag: Tag to match with the receive, on gloo; NCCL ignores it.
        group_dst: Rank of the receiver within ``group``, in place of ``dst``.
        mode: How the carrier travels; the same on both sides. ``"auto"`` follows from the tensor's
            size in bytes; ``"buffer"`` needs a tensor of :func:`carrier_buffer` on both sides.

    Raises:
        MessageError: If no carrier can ride on this tensor; raised before anything is sent.
        PeerRankError: If the receiver is not in the group, or is this rank.
        ProcessGroupError: If the group is destroyed.
        RuntimeError: Whatever the operation itself raises.
    """
    member = default_group() if group is None else member_group(group)
    if member is None:
        dist.send(tensor, dst, group, tag)  # torch's own error, or its warning for a non-member
        return
    channels = peer_channels(SENDING, member, dst, group_dst, tag, tensor, is_default=group is None)
    if channels.peer == channels.rank:
        raise PeerRankError(channels.rank, channels.peer, "a blocking send to itself never returns")
    message = channels.by(mode, tensor).outgoing(TensorMessage(tensor))
    # The group's own send, here and below: what dist.send would check was checked above.
    works = []
    for part in message.wire:
        works.append(member.send([part], channels.group_peer, tag))
    for work in works:
        work.wait()
    if mode != "buffer":  # whose room is the user's
        message.release()


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    mode: Mode = "auto",
) -> Carrier | None:
    """Receive into a tensor; returns the carrier of the span that was current at the sender.

    On CUDA this waits for the current stream once, to read the frame; :func:`irecv` leaves that to
    the moment at which its ``carrier`` is asked for.

    Args:
        tensor: Dense and contiguous, on a device that the group moves.
        src: Global rank of the sender. Receiving from any source is not supported.
        group: Process group; the default one if not given.
        tag: Tag to match with the send, on gloo; NCCL ignores it.
        group_src: Rank of the sender within ``group``, in place of ``src``.
        mode: How the carrier travels; the same on both sides.

    Returns:
        The carrier; ``None`` where the sender had no context. Where what arrived was no intact
        frame or not the one that was due, a falsy one whose ``status`` is ``rejected``: those are
        counted (``carrier.rejected``, ``carrier.out_of_turn``) and reported once. The tensor is
        received in any case.

    Raises:
        MessageError: If no carrier can ride on this tensor; raised before anything is received.
        PeerRankError: If the sender is not given, not in the group, or is this rank.
        ProcessGroupError: If the group is destroyed.
        RuntimeError: Whatever the operation itself raises.
    """
    member = default_group() if group is None else member_group(group)
    if member is None:
        dist.recv(tensor, src, group, tag)  # torch's own error, or its warning for a non-member
        return None
    channels = peer_channels(
        RECEIVING, member, src, group_src, tag, tensor, is_default=group is None
    )
    if channels.peer == channels.rank:
        raise PeerRankError(
            channels.rank, channels.peer, "a blocking receive from itself never returns"
        )
    channel = channels.by(mode, tensor)
    message = channel.transport.expect(tensor)
    sequence = channels.sequence
    turn = next(sequence.posted)
    works = []
    for part in message.wire:
        works.append(member.recv([part], channels.group_peer, tag))
    for work in works:
        work.wait()
    due = (turn + sequence.ahead) & MAX_SEQUENCE
    carrier = channel.arrived(message, due=due).carrier
    if mode != "buffer":
        message.release()
    return carrier if carrier.ids is not None else carrier.or_none()


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    mode: Mode = "auto",
) -> CarrierWork | None:
    """Start to send a tensor and the trace context of this moment.

    Do not change the tensor before the work is done. Arguments and errors are those of
    :func:`send`; sending to this rank itself is left to the back end (gloo cannot).

    Returns:
        The work to wait for; ``None`` on a rank that is not in the group, as in torch.
    """
    member = default_group() if group is None else member_group(group)
    if member is None:
        dist.isend(tensor, dst, group, tag)  # torch's own error, or its warning for a non-member
        return None
    channels = peer_channels(SENDING, member, dst, group_dst, tag, tensor, is_default=group is None)
    op = SendOp(tensor, mode, channels)
    works = [member.send([part], channels.group_peer, tag) for part in op.message.wire]
    return CarrierWork(works, op)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    mode: Mode = "auto",
) -> CarrierWork | None:
    """Start to receive into a tensor; after ``wait()`` the work has the sender's ``carrier``.

    The tensor holds what was received only after the work's own ``wait()``: a packed message is
    unpacked there. Arguments and errors are those of :func:`recv`.

    Returns:
        The work to wait for; ``None`` on a rank that is not in the group, as in torch.
    """
    member = default_group() if group is None else member_group(group)
    if member is None:
        dist.irecv(tensor, src, group, tag)  # torch's own error, or its warning for a non-member
        return None
    channels = peer_channels(
        RECEIVING, member, src, group_src, tag, tensor, is_default=group is None
    )
    op = RecvOp(tensor, mode, channels)
    works = [member.recv([part], channels.group_peer, tag) for part in op.message.wire]
    return CarrierWork(works, op)


def batch_isend_irecv(
    p2p_op_list: Sequence[dist.P2POp], *, mode: Mode = "auto"
) -> list[CarrierWork]:
    """``dist.batch_isend_irecv`` with a carrier on each operation.

    A frame that travels by itself is an operation of its own straight after its tensor's, in the
    same batch. On NCCL, torch's rule holds here too: if this is the first communication of the
    group, every rank of the group must take part.

    Args:
        p2p_op_list: Operations, ``dist.isend`` or ``dist.irecv`` in each, all of one group.
        mode: How the carriers travel; the same on both sides.

    Returns:
        One work per operation, in their order, so that each receive's ``carrier`` can be read. Wait
        for each of them.

    Raises:
        MessageError: If no carrier can ride on one of the tensors; raised before anything is sent.
        PeerRankError: If a peer is not in the group.
        ProcessGroupError: If the group is destroyed.
        ValueError: Whatever torch raises for a malformed batch.
    """
    for each in p2p_op_list:
        # All are checked before the first takes its turn: a refused batch leaves no gap.
        transport = transport_of(auto_mode(each.tensor) if mode == "auto" else mode)
        transport.room(each.tensor).release()
    ops: list[SendOp | RecvOp] = []
    wire_ops: list[dist.P2POp] = []
    for each in p2p_op_list:
        op: SendOp | RecvOp
        if each.op is dist.irecv:
            channels = peer_channels(RECEIVING, each.group, each.peer, None, each.tag, each.tensor)
            op = RecvOp(each.tensor, mode, channels)
        else:
            channels = peer_channels(SENDING, each.group, each.peer, None, each.tag, each.tensor)
            op = SendOp(each.tensor, mode, channels)
        ops.append(op)
        wire_ops.extend(
            dist.P2POp(each.op, part, each.peer, each.group, each.tag) for part in op.message.wire
        )
    works = dist.batch_isend_irecv(wire_ops)
    if len(works) != len(wire_ops):
        # The back end joined the operations (NCCL): what it returned is the work of each of them.
        return [CarrierWork(works, op) for op in ops]
    own = iter(works)
    return [CarrierWork([next(own) for _ in op.message.wire], op) for op in ops]
