//! Messages that receivers answer with: ExportTraceServiceResponse and google.rpc.Status. Both are
//! read leniently: an unreadable answer counts as an empty one, because the status code alone
//! decides the outcome. Fields that are not read are skipped; nesting has prost's limit of 100.

use prost::Message;

#[derive(Clone, PartialEq, Message)]
struct ExportTraceServiceResponse {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<ExportTracePartialSuccess>,
}

#[derive(Clone, PartialEq, Message)]
struct ExportTracePartialSuccess {
    #[prost(int64, tag = "1")]
    rejected_spans: i64,
    /// A string, shown even where it is not UTF-8.
    #[prost(bytes = "vec", tag = "2")]
    error_message: Vec<u8>,
}

/// google.rpc.Status.
#[derive(Clone, PartialEq, Message)]
struct Status {
    /// A string, as above.
    #[prost(bytes = "vec", tag = "2")]
    message: Vec<u8>,
}

fn text(bytes: &[u8]) -> Option<String> {
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).into_owned())
}

/// Number of rejected spans and the receiver's message in an ExportTraceServiceResponse; the
/// message may be a warning alone.
pub fn partial_success(response: &[u8]) -> (u64, Option<String>) {
    let partial = ExportTraceServiceResponse::decode(response)
        .unwrap_or_default()
        .partial_success
        .unwrap_or_default();
    // A negative count is none.
    (
        u64::try_from(partial.rejected_spans).unwrap_or(0),
        text(&partial.error_message),
    )
}

/// The message of a google.rpc.Status.
pub fn status_message(status: &[u8]) -> Option<String> {
    text(&Status::decode(status).unwrap_or_default().message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read() {
        assert_eq!(
            partial_success(b"\x0a\x0b\x08\x03\x12\x07no room"),
            (3, Some("no room".into()))
        );
        assert_eq!(
            partial_success(b"\x0a\x04\x12\x02\xff!"),
            (0, Some("\u{fffd}!".into()))
        );
        assert_eq!(partial_success(b""), (0, None));
        // With a code and a detail.
        assert_eq!(
            status_message(b"\x08\x08\x12\x05later\x1a\x03\x0a\x01x").as_deref(),
            Some("later")
        );
        assert_eq!(status_message(b"\x08\x08"), None);
    }

    #[test]
    fn no_bytes_are_too_strange() {
        let samples: [&[u8]; 8] = [
            b"\xff",
            &[0xff; 30],
            b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            b"<html>",
            b"\x0a\x02\x08",
            b"\x0b",
            // -1 of int64.
            b"\x0a\x0b\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
            // Groups within groups, of a field that nobody knows.
            &[0x7b; 64 << 10],
        ];
        for bytes in samples {
            assert_eq!(partial_success(bytes), (0, None), "{bytes:?}");
            status_message(bytes);
        }
    }
}
