//! ttRPC's frames, for the benchmarks' client and the test agent's server.
//!
//! A frame is length, stream, type and flags (u32, u32, u8, u8; big endian), then the message. A
//! request is stream 1, 3, 5, ..; its response has the same number.

use anyhow::{Result, ensure};
use std::io::Read;

/// The port of the agent's server.
pub const PORT: u32 = 1024;
pub const REQUEST: u8 = 1;
pub const RESPONSE: u8 = 2;
/// The protocol's limit of one message.
const LONGEST: usize = 4 << 20;

pub struct Frame {
    pub stream: u32,
    pub kind: u8,
    pub message: Vec<u8>,
}

impl Frame {
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        ensure!(
            self.message.len() <= LONGEST,
            "a message of {} bytes is too long",
            self.message.len()
        );
        let mut bytes = u32::try_from(self.message.len())?.to_be_bytes().to_vec();
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend([self.kind, 0]);
        bytes.extend_from_slice(&self.message);
        Ok(bytes)
    }

    pub fn read(from: &mut impl Read) -> Result<Self> {
        let mut header = [0; 10];
        from.read_exact(&mut header)?;
        let [a, b, c, d, e, f, g, h, kind, _flags] = header;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        ensure!(length <= LONGEST, "a message of {length} bytes");
        let mut message = vec![0; length];
        from.read_exact(&mut message)?;
        Ok(Self {
            stream: u32::from_be_bytes([e, f, g, h]),
            kind,
            message,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_read_as_it_was_written_and_a_cut_one_is_refused() {
        let bytes = Frame {
            stream: 3,
            kind: REQUEST,
            message: b"abc".to_vec(),
        }
        .to_bytes()
        .unwrap();
        assert_eq!(bytes[..10], [0, 0, 0, 3, 0, 0, 0, 3, 1, 0]);
        let read = Frame::read(&mut &bytes[..]).unwrap();
        assert_eq!(
            (read.stream, read.kind, read.message.as_slice()),
            (3, REQUEST, &b"abc"[..])
        );
        assert!(Frame::read(&mut &bytes[..12]).is_err());
        assert!(Frame::read(&mut &[0xff; 10][..]).is_err());
    }
}
