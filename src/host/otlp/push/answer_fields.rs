//! The messages that receivers answer with: ExportTraceServiceResponse and google.rpc.Status. Read
//! leniently: an answer that cannot be read says nothing, and its status code has said what
//! matters.

/// Fields of a message, in order.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Varint(u64, u64),
    Bytes(u64, &'a [u8]),
    /// Of a type that no message here has.
    Other,
}

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        // Ten groups of seven bits are the longest.
        for shift in (0..70).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Field<'a>;

    /// None at the end, and at what is no field.
    fn next(&mut self) -> Option<Field<'a>> {
        let tag = self.varint()?;
        let number = tag >> 3;
        Some(match tag & 7 {
            0 => Field::Varint(number, self.varint()?),
            1 => self.take(8).map(|_| Field::Other)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Field::Bytes(number, self.take(length)?)
            }
            5 => self.take(4).map(|_| Field::Other)?,
            _ => return None,
        })
    }
}

fn message(bytes: &[u8], number: u64) -> Option<&[u8]> {
    Fields(bytes).find_map(|field| match field {
        Field::Bytes(n, bytes) if n == number => Some(bytes),
        _ => None,
    })
}

fn text(bytes: &[u8], number: u64) -> Option<String> {
    message(bytes, number).map(|bytes| String::from_utf8_lossy(bytes).into_owned()).filter(|text| !text.is_empty())
}

fn varint(bytes: &[u8], number: u64) -> Option<u64> {
    Fields(bytes).find_map(|field| match field {
        Field::Varint(n, value) if n == number => Some(value),
        _ => None,
    })
}

/// Of an ExportTraceServiceResponse: how many spans were rejected, and what the receiver says,
/// which may be a warning alone.
pub fn partial_success(response: &[u8]) -> (u64, Option<String>) {
    let Some(partial) = message(response, 1) else { return (0, None) };
    // Signed on the wire; a negative count is none.
    let rejected = varint(partial, 1).filter(|n| i64::try_from(*n).is_ok());
    (rejected.unwrap_or(0), text(partial, 2))
}

/// The message of a google.rpc.Status.
pub fn status_message(status: &[u8]) -> Option<String> {
    text(status, 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::views::protobuf::Message;

    #[test]
    fn answers_are_read() {
        let partial = Message::default().uint(1, 3).text(2, "no room");
        assert_eq!(partial_success(&Message::default().message(1, partial).into_bytes()), (3, Some("no room".into())));
        assert_eq!(partial_success(b""), (0, None));
        let detail = Message::default().text(1, "type.googleapis.com/google.rpc.RetryInfo").message(2, Message::default());
        let status = Message::default().uint(1, 8).text(2, "later").message(3, detail).into_bytes();
        assert_eq!(status_message(&status).as_deref(), Some("later"));
    }

    #[test]
    fn no_bytes_are_too_strange() {
        let samples: [&[u8]; 6] =
            [b"\xff", &[0xff; 30], b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"<html>", b"\x0a\x02\x08", b"\x0b"];
        for bytes in samples {
            assert_eq!(partial_success(bytes).0, 0, "{bytes:?}");
            status_message(bytes);
        }
    }
}
