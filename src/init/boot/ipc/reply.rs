//! Requests to a process of the init, each with a socket for its answers. Several can be under way
//! at once, and the requester sees the end of the answering process.

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

/// Makes a pair of connected sockets that keep message boundaries.
pub fn pair() -> nix::Result<(OwnedFd, OwnedFd)> {
    crate::machine::sys::retried(|| {
        socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
    })
}

/// Sends a request; returns the socket for its answers. None when the receiver is gone.
pub fn ask(socket: &OwnedFd, request: &[&[u8]]) -> Option<OwnedFd> {
    let (ours, theirs) = pair().ok()?;
    let parts: Vec<IoSlice<'_>> = request.iter().map(|part| IoSlice::new(part)).collect();
    let reply = [theirs.as_raw_fd()];
    sendmsg::<()>(
        socket.as_raw_fd(),
        &parts,
        &[ControlMessage::ScmRights(&reply)],
        MsgFlags::MSG_NOSIGNAL,
        None,
    )
    .ok()?;
    // Drop this copy, so that the answering process holds the last one and its close is seen.
    drop(theirs);
    Some(ours)
}

/// Receives the next request and the socket for its answers. None when the last requester is gone.
pub fn asked(socket: &OwnedFd, text: &mut [u8]) -> Option<(usize, Option<OwnedFd>)> {
    let (length, descriptors) = receive(socket, text)?;
    Some((
        length,
        descriptors
            .into_iter()
            .find_map(crate::machine::sys::inherited),
    ))
}

/// Answers with a number, and a descriptor where there is one. An answer to a requester that is
/// gone is lost.
pub fn answer(reply: &OwnedFd, number: i64, descriptor: Option<&OwnedFd>) {
    let rights: Vec<RawFd> = descriptor.iter().map(|d| d.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&rights)];
    let control = if descriptor.is_some() {
        &rights[..]
    } else {
        &[]
    };
    let _unused = sendmsg::<()>(
        reply.as_raw_fd(),
        &[IoSlice::new(&number.to_ne_bytes())],
        control,
        MsgFlags::MSG_NOSIGNAL,
        None,
    );
}

/// Receives the next answer. None when the answering process has ended.
pub fn answered(reply: &OwnedFd) -> Option<(i64, Option<OwnedFd>)> {
    let mut number = [0; size_of::<i64>()];
    let (length, descriptors) = receive(reply, &mut number)?;
    (length == number.len()).then(|| {
        (
            i64::from_ne_bytes(number),
            descriptors
                .into_iter()
                .find_map(crate::machine::sys::inherited),
        )
    })
}

/// Receives one message, which has at least a byte, and its descriptors, as far as this process has
/// room for them. None at the end.
pub fn receive(socket: &OwnedFd, text: &mut [u8]) -> Option<(usize, Vec<RawFd>)> {
    let mut space = cmsg_space!([RawFd; 1]);
    loop {
        let mut parts = [IoSliceMut::new(text)];
        match recvmsg::<()>(
            socket.as_raw_fd(),
            &mut parts,
            Some(&mut space),
            MsgFlags::MSG_CMSG_CLOEXEC,
        ) {
            Ok(message) if message.bytes > 0 => {
                let rights = |part| {
                    if let ControlMessageOwned::ScmRights(some) = part {
                        some
                    } else {
                        Vec::new()
                    }
                };
                let parts = message.cmsgs().into_iter().flatten();
                return Some((message.bytes, parts.flat_map(rights).collect()));
            }
            Err(Errno::EINTR) => {}
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn answers_come_back_with_their_descriptors_and_the_end_is_seen() {
        let (ours, theirs) = pair().unwrap();
        let reply = ask(&ours, &[b"a", b"bc"]).unwrap();
        let mut text = [0; 8];
        let (length, their_reply) = asked(&theirs, &mut text).unwrap();
        let their_reply = their_reply.unwrap();
        assert_eq!(&text[..length], b"abc");
        let file: OwnedFd = std::fs::File::open("/proc/self/comm").unwrap().into();
        answer(&their_reply, -5, None);
        answer(&their_reply, i64::MAX, Some(&file));
        drop(their_reply);
        assert!(matches!(answered(&reply), Some((-5, None))));
        let (number, descriptor) = answered(&reply).unwrap();
        assert_eq!(number, i64::MAX);
        let mut name = String::new();
        std::fs::File::from(descriptor.unwrap())
            .read_to_string(&mut name)
            .unwrap();
        assert!(!name.is_empty());
        assert!(answered(&reply).is_none());
        drop(ours);
        assert!(asked(&theirs, &mut text).is_none());
    }
}
