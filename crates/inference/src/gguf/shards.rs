//! Sets of shards, `NAME-00001-of-00003.gguf` …: as `gguf-split` of llama.cpp writes them. All metadata is in the
//! first shard; `split.no` (from 0), `split.count` and `split.tensors.count` (of all shards) are in each.

use super::{
    Gguf, GgufError, Metadata, Source, TensorData, TensorSpec, Value, encode_str, encode_value, read,
    write::{Sealed, Writer, checked_alignment, checked_tensors, refuse, sync_parent},
};
use std::{
    collections::HashMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

/// What the keys of shards begin with.
pub(super) const KEYS: &str = "split.";
const NO: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// Magic, version, number of tensors, number of keys.
const PREAMBLE: usize = 4 + 4 + 8 + 8;

/// Path of shard `no` (from 0) of `count`, for `prefix` without the ending.
#[must_use]
pub fn shard_path(prefix: &Path, no: usize, count: usize) -> PathBuf {
    let mut name = prefix.file_name().unwrap_or_default().to_os_string();
    name.push(format!("-{:05}-of-{count:05}.gguf", no + 1));
    prefix.with_file_name(name)
}

/// The prefix of a path that is named as shard `no` of `count`.
fn prefix(path: &Path, no: usize, count: usize) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    Some(path.with_file_name(name.strip_suffix(&format!("-{:05}-of-{count:05}.gguf", no + 1))?))
}

/// What a file says about its place in a set.
struct Place {
    no: usize,
    count: usize,
    tensors: i64,
}

impl Place {
    /// `None` for a file that is whole by itself.
    fn of(head: &read::Head) -> Result<Option<Self>, GgufError> {
        let keys = head.metadata.iter().filter(|(k, _)| k.starts_with(KEYS)).cloned().collect();
        let keys = Metadata::new(keys);
        let count = keys.optional::<u16>(COUNT)?.unwrap_or(1);
        if count <= 1 {
            return Ok(None);
        }
        let tensors = i64::from(keys.required::<i32>(TENSORS)?);
        Ok(Some(Self { no: usize::from(keys.required::<u16>(NO)?), count: usize::from(count), tensors }))
    }
}

/// A file that has to be whole by itself.
pub(super) fn alone(source: Source, head: read::Head) -> Result<Gguf, GgufError> {
    match Place::of(&head)? {
        None => Ok(Gguf::assemble(vec![(source, head)])),
        Some(place) => Err(GgufError::Unsupported {
            what: format!(
                "shard {} of {} by itself; open the set by the path of its first file",
                place.no + 1,
                place.count
            ),
        }),
    }
}

/// The file at `path`, with all other shards if it is the first one of a set.
pub(super) fn complete(path: &Path, source: Source, head: read::Head) -> Result<Gguf, GgufError> {
    let Some(place) = Place::of(&head)? else { return Ok(Gguf::assemble(vec![(source, head)])) };
    let (no, count) = (place.no, place.count);
    let Some(prefix) = prefix(path, no, count) else {
        let what = format!(
            "the file says that it is shard {} of {count}, but its name does not end in `{}`, so that the others \
             cannot be found: give all shards their names back",
            no + 1,
            shard_path(Path::new(""), no, count).display()
        );
        return Err(GgufError::shards(path, what));
    };
    if no != 0 {
        let first = shard_path(&prefix, 0, count);
        let what = format!("this is shard {} of {count}: open the first one, {}", no + 1, first.display());
        return Err(GgufError::shards(path, what));
    }
    let mut files = vec![(source, head)];
    for no in 1..count {
        let file = shard(&shard_path(&prefix, no, count), no, count, &files[0].1)?;
        files.push(file);
    }
    check_tensors(path, &files, place.tensors)?;
    Ok(Gguf::assemble(files))
}

/// Opens shard `no` and checks that it belongs to the set that `first` begins.
fn shard(path: &Path, no: usize, count: usize, first: &read::Head) -> Result<(Source, read::Head), GgufError> {
    let refuse = |what: String| Err(GgufError::shards(path, what));
    if !path.exists() {
        return refuse(format!("shard {} of {count} is missing: fetch it, or the whole set again", no + 1));
    }
    let source = Source::open(path)?;
    let head = read::parse(source.bytes()).map_err(|e| GgufError::shards(path, e.to_string()))?;
    let place = Place::of(&head).map_err(|e| GgufError::shards(path, e.to_string()))?;
    let Some(place) = place else {
        return refuse(format!("a whole file under the name of shard {} of {count}", no + 1));
    };
    if place.count != count {
        let what = format!("the file belongs to a set of {} shards, the first shard to one of {count}", place.count);
        return refuse(what);
    }
    if place.no != no {
        return refuse(format!("the file is named as shard {}, but says that it is shard {}", no + 1, place.no + 1));
    }
    let theirs: HashMap<&str, &Value> = first.metadata.iter().map(|(k, v)| (k.as_str(), v)).collect();
    let own = |key: &str| key.starts_with(KEYS) || key == "general.alignment";
    match head.metadata.iter().find(|(k, v)| !own(k) && theirs.get(k.as_str()) != Some(&v)) {
        Some((key, _)) => refuse(format!("`{key}` is not what the first shard says: the set is mixed")),
        None => Ok((source, head)),
    }
}

fn check_tensors(path: &Path, files: &[(Source, read::Head)], said: i64) -> Result<(), GgufError> {
    let mut seen = HashMap::new();
    for (no, (_, head)) in files.iter().enumerate() {
        for tensor in &head.tensors {
            if let Some(before) = seen.insert(tensor.name.as_str(), no) {
                let what = format!("tensor `{}` is in shard {} and in shard {}", tensor.name, before + 1, no + 1);
                return Err(GgufError::shards(path, what));
            }
        }
    }
    if i64::try_from(seen.len()) == Ok(said) {
        return Ok(());
    }
    let what = format!("the shards hold {} tensors, the first says {said}: the set is mixed or unfinished", seen.len());
    Err(GgufError::shards(path, what))
}

/// Writes a model as shards of at most `max_bytes` each, `PREFIX-00001-of-…`, tensors in iterator order. The first
/// shard holds all metadata, and no tensor if none fits beside it. The set appears only when it is complete and
/// durable: an older set of the same names is closed first, and the first shard, without which no other opens, comes
/// last. Returns path and size in bytes of every shard.
///
/// # Errors
/// [`GgufError::Write`] for what does not fit into a shard and for anything stock llama.cpp would refuse,
/// [`GgufError::Io`], or what a lazy tensor returned.
pub fn write_shards<'a>(
    prefix: &Path,
    metadata: &[(String, Value)],
    tensors: impl IntoIterator<Item = (TensorSpec, TensorData<'a>)>,
    max_bytes: u64,
) -> Result<Vec<(PathBuf, u64)>, GgufError> {
    let (specs, data): (Vec<_>, Vec<_>) = tensors.into_iter().unzip();
    let plan = plan(metadata, &specs, max_bytes)?;
    let mut data = data.into_iter();
    let mut sealed = Vec::with_capacity(plan.len());
    for (no, range) in plan.iter().enumerate() {
        let keys = keys_of(metadata, no, plan.len(), specs.len())?;
        let path = shard_path(prefix, no, plan.len());
        let mut writer = Writer::create(&path, &keys, &specs[range.clone()])?;
        for data in data.by_ref().take(range.len()) {
            writer.push_data(data)?;
        }
        sealed.push(writer.seal()?);
    }
    publish(sealed)
}

fn publish(sealed: Vec<Sealed>) -> Result<Vec<(PathBuf, u64)>, GgufError> {
    if let Some(first) = sealed.first().map(Sealed::path).filter(|p| p.exists()) {
        fs::remove_file(first).and_then(|()| sync_parent(first)).map_err(|e| GgufError::io(first, e))?;
    }
    let mut out = Vec::with_capacity(sealed.len());
    for file in sealed.into_iter().rev() {
        let path = file.path().to_owned();
        out.push((path, file.publish()?));
    }
    out.reverse();
    Ok(out)
}

/// The metadata of one shard.
fn keys_of(
    metadata: &[(String, Value)],
    no: usize,
    count: usize,
    tensors: usize,
) -> Result<Vec<(String, Value)>, GgufError> {
    let own = |key: &str| no == 0 || key == "general.alignment";
    let mut out: Vec<_> = metadata.iter().filter(|(k, _)| own(k)).cloned().collect();
    let too_many = || refuse(format!("{tensors} tensors in {count} shards are more than the format can count"));
    let small = |n: usize| u16::try_from(n).map_err(|_| too_many());
    out.push((NO.to_owned(), Value::U16(small(no)?)));
    out.push((COUNT.to_owned(), Value::U16(small(count)?)));
    out.push((TENSORS.to_owned(), Value::I32(i32::try_from(tensors).map_err(|_| too_many())?)));
    Ok(out)
}

/// Which tensors go into which shard: each is filled before the next begins.
fn plan(metadata: &[(String, Value)], specs: &[TensorSpec], max: u64) -> Result<Vec<Range<usize>>, GgufError> {
    let alignment = checked_alignment(metadata)?;
    let lens = checked_tensors(specs)?;
    let head = |no: usize| -> Result<usize, GgufError> {
        let mut bytes = Vec::new();
        for (key, value) in keys_of(metadata, no, 1, specs.len())? {
            encode_str(&mut bytes, &key);
            encode_value(&mut bytes, &value);
        }
        Ok(PREAMBLE + bytes.len())
    };
    let (first, other) = (head(0)?, head(1)?);
    let size = |head: usize, data: usize| (head.next_multiple_of(alignment) + data) as u64;
    if size(first, 0) > max {
        let what = format!("the metadata alone takes {} bytes, a shard may have {max}", size(first, 0));
        return Err(refuse(what));
    }
    let mut out = Vec::new();
    let (mut start, mut in_head, mut in_data) = (0, first, 0);
    for (at, (spec, (name, len))) in specs.iter().zip(&lens).enumerate() {
        let entry = 8 + name.len() + 4 + 8 * spec.dims.len() + 4 + 8;
        let data = len.next_multiple_of(alignment);
        if size(in_head + entry, in_data + data) > max {
            out.push(start..at);
            (start, in_head, in_data) = (at, other, 0);
        }
        (in_head, in_data) = (in_head + entry, in_data + data);
        if size(in_head, in_data) > max {
            let what = format!(
                "tensor `{name}` takes {} bytes in a shard of its own, a shard may have {max}: raise the limit, or \
                 store the tensor in a smaller type",
                size(in_head, in_data)
            );
            return Err(refuse(what));
        }
    }
    out.push(start..specs.len());
    Ok(out)
}
