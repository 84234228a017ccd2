//! Protocol buffers, as far as the requests of kata-agent need them: writing fields by number, and
//! finding fields in a message.

use anyhow::{Context, Result, bail};

/// Wire type of numbers.
const VARINT: u64 = 0;
/// Wire type of texts, bytes and messages.
const BYTES: u64 = 2;

/// A message under construction. A field with proto3's default value is omitted.
#[derive(Clone, Debug, Default)]
pub struct Message(Vec<u8>);

impl Message {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn number(mut self, field: u32, value: u64) -> Self {
        if value != 0 {
            self.key(field, VARINT);
            varint(&mut self.0, value);
        }
        self
    }

    pub fn bytes(mut self, field: u32, value: &[u8]) -> Self {
        if !value.is_empty() {
            self.put(field, value);
        }
        self
    }

    pub fn text(self, field: u32, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    /// A repeated text. Empty texts stay.
    pub fn texts<T: AsRef<str>>(mut self, field: u32, values: impl IntoIterator<Item = T>) -> Self {
        values
            .into_iter()
            .for_each(|v| self.put(field, v.as_ref().as_bytes()));
        self
    }

    /// A message within this one. An empty one stays: its presence counts.
    pub fn message(mut self, field: u32, value: Message) -> Self {
        self.put(field, &value.0);
        self
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    fn put(&mut self, field: u32, value: &[u8]) {
        self.key(field, BYTES);
        varint(&mut self.0, value.len() as u64);
        self.0.extend_from_slice(value);
    }

    fn key(&mut self, field: u32, wire_type: u64) {
        varint(&mut self.0, u64::from(field) << 3 | wire_type);
    }
}

fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// A field of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message, in their order.
pub fn fields(mut bytes: &[u8]) -> Result<Vec<(u32, Value<'_>)>> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let key = take_varint(&mut bytes)?;
        let value = match key & 7 {
            VARINT => Value::Number(take_varint(&mut bytes)?),
            BYTES => {
                let length = usize::try_from(take_varint(&mut bytes)?)?;
                let (value, rest) = bytes
                    .split_at_checked(length)
                    .context("protobuf: the message ends inside a field")?;
                bytes = rest;
                Value::Bytes(value)
            }
            other => bail!("protobuf: wire type {other}"),
        };
        all.push((u32::try_from(key >> 3)?, value));
    }
    Ok(all)
}

/// The last field of this number that holds bytes; empty if there is none.
pub fn bytes_of(message: &[u8], field: u32) -> Result<&[u8]> {
    let last = fields(message)?
        .into_iter()
        .rev()
        .find_map(|(number, value)| match value {
            Value::Bytes(bytes) if number == field => Some(bytes),
            _ => None,
        });
    Ok(last.unwrap_or_default())
}

/// The last field of this number that holds a number; 0 if there is none.
pub fn number_of(message: &[u8], field: u32) -> Result<u64> {
    let last = fields(message)?
        .into_iter()
        .rev()
        .find_map(|(number, value)| match value {
            Value::Number(n) if number == field => Some(n),
            _ => None,
        });
    Ok(last.unwrap_or_default())
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (first, rest) = bytes
            .split_first()
            .context("protobuf: the message ends inside a number")?;
        *bytes = rest;
        value |= u64::from(first & 0x7f) << shift;
        if first & 0x80 == 0 {
            return Ok(value);
        }
    }
    bail!("protobuf: a number of more than 64 bits")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_number_and_defaults_are_omitted() {
        let inner = Message::new().text(1, "a");
        let bytes = Message::new()
            .number(1, 300)
            .text(2, "")
            .texts(3, ["", "b"])
            .message(4, inner)
            .number(5, 0)
            .into_bytes();
        assert_eq!(bytes[..3], [8, 0xac, 2]);
        let found = fields(&bytes).unwrap();
        assert_eq!(
            found.iter().map(|(n, _)| *n).collect::<Vec<_>>(),
            [1, 3, 3, 4]
        );
        assert_eq!(
            (number_of(&bytes, 1).unwrap(), bytes_of(&bytes, 3).unwrap()),
            (300, &b"b"[..])
        );
        assert_eq!(bytes_of(bytes_of(&bytes, 4).unwrap(), 1).unwrap(), b"a");
        assert!(fields(&bytes[..bytes.len() - 1]).is_err());
    }
}
