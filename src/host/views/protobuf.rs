//! Protocol buffers, the writing half of the wire format: as much of it as [`super::perfetto`] and
//! the OTLP requests need.

/// A message under construction.
#[derive(Default)]
pub struct Message(Vec<u8>);

/// Wire types.
const VARINT: u64 = 0;
const I64: u64 = 1;
const LEN: u64 = 2;

impl Message {
    pub fn uint(mut self, field: u64, value: u64) -> Self {
        self.tag(field, VARINT);
        self.varint(value);
        self
    }

    pub fn fixed64(mut self, field: u64, value: u64) -> Self {
        self.tag(field, I64);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    pub fn text(self, field: u64, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    pub fn message(self, field: u64, value: Message) -> Self {
        self.bytes(field, &value.0)
    }

    /// In bytes.
    pub fn size(&self) -> usize {
        self.0.len()
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    pub fn bytes(mut self, field: u64, value: &[u8]) -> Self {
        self.tag(field, LEN);
        self.varint(value.len() as u64);
        self.0.extend_from_slice(value);
        self
    }

    fn tag(&mut self, field: u64, wire_type: u64) {
        self.varint((field << 3) | wire_type);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_of_the_encoding() {
        let inner = Message::default().uint(1, 150);
        assert_eq!(inner.0, [0x08, 0x96, 0x01]);
        assert_eq!(Message::default().message(3, inner).0, [0x1a, 3, 0x08, 0x96, 0x01]);
        assert_eq!(Message::default().text(2, "testing").0, *b"\x12\x07testing");
        assert_eq!(Message::default().uint(1, u64::MAX).0, [8, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
        assert_eq!(Message::default().fixed64(47, 1).0, [0xf9, 0x02, 1, 0, 0, 0, 0, 0, 0, 0]);
    }
}
