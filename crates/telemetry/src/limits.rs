//! Sizes and counts that bound what one request may cost. A limit on a whole request refuses it (413); a limit
//! on one record quarantines that record only.

/// Bounds of one request. The defaults fit phones that come back after days offline.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Bytes of the body as sent.
    pub encoded_bytes: usize,
    /// Bytes of the body after decompression.
    pub decoded_bytes: usize,
    /// Records (events, log records, spans or data points) in one request.
    pub records: usize,
    /// Attributes of one record, resource and scope included.
    pub attributes: usize,
    /// Bytes of one attribute value kept in the `attrs` column.
    pub attribute_bytes: usize,
    /// Attributes without a column of their own that are kept in `attrs`.
    pub extra_attributes: usize,
    /// Bytes of a question or an answer; longer text quarantines the record.
    pub text_bytes: usize,
    /// Retrieved chunks of one interaction.
    pub chunks: usize,
    /// Nesting of attribute values.
    pub depth: usize,
    /// Buckets or quantiles of one data point, per list.
    pub buckets: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            encoded_bytes: 8 << 20,
            decoded_bytes: 8 << 20,
            records: 10_000,
            attributes: 256,
            attribute_bytes: 1 << 10,
            extra_attributes: 32,
            text_bytes: 64 << 10,
            chunks: 128,
            depth: 16,
            buckets: 512,
        }
    }
}
