//! Record format of the queue's log: `length u32 LE · CRC-32 of the payload u32 LE · payload`; the payload is a tag
//! byte and its fields. A torn or damaged tail ends the replay at the last good record.

/// Records longer than this are damage, not data.
const MAX_RECORD_BYTES: usize = 64 << 20;

/// One entry of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Record {
    /// First record of every file: JSON of the queue's counters.
    Base(Vec<u8>),
    /// A queued event: local number, number of the durable report it stems from (0 = none), interaction or not, JSON.
    Event { no: u64, report: u64, interaction: bool, json: Vec<u8> },
    /// A batch was formed: its events left the queue, its body is fixed from here on.
    Batch { seq: u64, events: Vec<u64>, body: Vec<u8> },
    /// The batch was acknowledged.
    Acked { seq: u64 },
    /// The batch will never be accepted; JSON of the counters after adding what was lost.
    Refused { seq: u64, counters: Vec<u8> },
    /// The batch was too large: its events are queued again under these numbers.
    Split { seq: u64 },
    /// Events pushed out by the bounds; JSON of the counters after that.
    Dropped { events: Vec<u64>, counters: Vec<u8> },
}

fn put_list(out: &mut Vec<u8>, list: &[u64]) {
    out.extend_from_slice(&(list.len() as u32).to_le_bytes());
    for n in list {
        out.extend_from_slice(&n.to_le_bytes());
    }
}

impl Record {
    /// The record as it stands in the file.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut p = vec![0u8; 8];
        match self {
            Self::Base(json) => {
                p.push(1);
                p.extend_from_slice(json);
            }
            Self::Event { no, report, interaction, json } => {
                p.push(2);
                p.extend_from_slice(&no.to_le_bytes());
                p.extend_from_slice(&report.to_le_bytes());
                p.push(u8::from(*interaction));
                p.extend_from_slice(json);
            }
            Self::Batch { seq, events, body } => {
                p.push(3);
                p.extend_from_slice(&seq.to_le_bytes());
                put_list(&mut p, events);
                p.extend_from_slice(body);
            }
            Self::Acked { seq } => {
                p.push(4);
                p.extend_from_slice(&seq.to_le_bytes());
            }
            Self::Refused { seq, counters } => {
                p.push(5);
                p.extend_from_slice(&seq.to_le_bytes());
                p.extend_from_slice(counters);
            }
            Self::Split { seq } => {
                p.push(6);
                p.extend_from_slice(&seq.to_le_bytes());
            }
            Self::Dropped { events, counters } => {
                p.push(7);
                put_list(&mut p, events);
                p.extend_from_slice(counters);
            }
        }
        let length = (p.len() - 8) as u32;
        let crc = crc32fast::hash(&p[8..]);
        p[..4].copy_from_slice(&length.to_le_bytes());
        p[4..8].copy_from_slice(&crc.to_le_bytes());
        p
    }

    fn decode(payload: &[u8]) -> Option<Self> {
        let mut r = Reader(payload);
        Some(match r.u8()? {
            1 => Self::Base(r.rest()),
            2 => Self::Event { no: r.u64()?, report: r.u64()?, interaction: r.u8()? == 1, json: r.rest() },
            3 => Self::Batch { seq: r.u64()?, events: r.list()?, body: r.rest() },
            4 => Self::Acked { seq: r.u64()? },
            5 => Self::Refused { seq: r.u64()?, counters: r.rest() },
            6 => Self::Split { seq: r.u64()? },
            7 => Self::Dropped { events: r.list()?, counters: r.rest() },
            _ => return None,
        })
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }
    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|b| b[0])
    }
    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }
    fn list(&mut self) -> Option<Vec<u64>> {
        let n = u32::from_le_bytes(self.take()?) as usize;
        if n.checked_mul(8)? > self.0.len() {
            return None;
        }
        (0..n).map(|_| self.u64()).collect()
    }
    fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0).to_vec()
    }
}

/// Every good record from the start, and how many bytes they take. Anything after that is a torn tail or damage.
pub(super) fn replay(bytes: &[u8]) -> (Vec<Record>, usize) {
    let mut records = Vec::new();
    let mut at = 0;
    while let Some((header, rest)) = bytes[at..].split_first_chunk::<8>() {
        let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
        let crc = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        if length > MAX_RECORD_BYTES || rest.len() < length || crc32fast::hash(&rest[..length]) != crc {
            break;
        }
        let Some(record) = Record::decode(&rest[..length]) else {
            break;
        };
        records.push(record);
        at += 8 + length;
    }
    (records, at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples() -> Vec<Record> {
        vec![
            Record::Base(b"{}".to_vec()),
            Record::Event { no: 1, report: 9, interaction: true, json: b"{\"a\":1}".to_vec() },
            Record::Batch { seq: 4, events: vec![1, 2, 3], body: b"body".to_vec() },
            Record::Acked { seq: 4 },
            Record::Refused { seq: 5, counters: b"{}".to_vec() },
            Record::Split { seq: 6 },
            Record::Dropped { events: vec![7], counters: vec![] },
        ]
    }

    #[test]
    fn records_round_trip_and_every_cut_keeps_the_good_prefix() {
        let all: Vec<Vec<u8>> = samples().iter().map(Record::encode).collect();
        let bytes = all.concat();
        assert_eq!(replay(&bytes), (samples(), bytes.len()));
        for cut in 0..bytes.len() {
            let (got, used) = replay(&bytes[..cut]);
            assert!(used <= cut);
            assert_eq!(got[..], samples()[..got.len()]);
        }
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let (_, used) = replay(&bytes);
            prop_assert!(used <= bytes.len());
        }

        #[test]
        fn one_flipped_bit_never_yields_a_wrong_record(at in 0usize..100, bit in 0u8..8) {
            let mut bytes: Vec<u8> = samples().iter().flat_map(Record::encode).collect();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let (got, _) = replay(&bytes);
            prop_assert_eq!(&got[..], &samples()[..got.len()]);
        }
    }
}
