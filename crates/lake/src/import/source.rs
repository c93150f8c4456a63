//! Where history comes from: a folder or a bucket that the configuration allows. An object is hashed while it is opened; one in
//! a bucket is copied to an unnamed file first, because Parquet is read from its end and a connection may not last.

use flywheel_types::{Digest, Error, ErrorKind};
use futures::TryStreamExt as _;
use object_store::path::Path;
use object_store::{GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt as _, ObjectStoreScheme, parse_url_opts};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::sync::Arc;
use url::Url;

/// Bytes read at once.
const BUFFER: usize = 1 << 20;

/// A folder, a bucket's prefix, or one object. Options of its store come with it and are never shown.
#[derive(Clone)]
pub struct Source {
    url: Url,
    prefix: Path,
    store: Arc<dyn ObjectStore>,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.url.fmt(f)
    }
}
impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A URL in parts that can be compared: what `..` and percent signs stood for is resolved.
fn parts(text: &str) -> Result<(Url, Path), Error> {
    let bad = |why: String| {
        Error::invalid(
            "bad_import_source",
            format!("`{}` cannot be a source: {why}", text.chars().take(200).collect::<String>()),
            "write `file:///folder/`, `s3://bucket/prefix/`, `gs://bucket/prefix/` or `az://container/prefix/`",
        )
    };
    let url = Url::parse(text).map_err(|e| bad(e.to_string()))?;
    if !url.username().is_empty() || url.password().is_some() || url.query().is_some() || url.fragment().is_some() {
        return Err(bad("it holds more than scheme, host and path".to_owned()));
    }
    use ObjectStoreScheme as S;
    match ObjectStoreScheme::parse(&url).map_err(|e| bad(e.to_string()))? {
        (S::Local | S::AmazonS3 | S::GoogleCloudStorage | S::MicrosoftAzure, path) => Ok((url, path)),
        _ => Err(bad(format!("`{}` is no scheme of a folder or bucket", url.scheme()))),
    }
}

/// Checks a source against what the configuration allows, without opening it.
///
/// # Errors
/// `Invalid` for something that is no URL of a folder or bucket; `Forbidden` when no allowed source contains it.
pub fn check(text: &str, allowed: &[String]) -> Result<Url, Error> {
    let (url, path) = parts(text)?;
    for prefix in allowed {
        let (root, within) = parts(prefix)?;
        let same = (root.scheme(), root.host_str(), root.port()) == (url.scheme(), url.host_str(), url.port());
        if same && path.prefix_matches(&within) {
            return Ok(url);
        }
    }
    let hint = "the server's configuration names what may be imported: `[import] sources = [\"file:///srv/history/\"]`";
    Err(Error::new(
        ErrorKind::Forbidden,
        "import_source_not_allowed",
        format!("`{url}` is not an allowed source"),
        hint,
    ))
}

impl Source {
    /// Opens a checked source. `options` configure its store (`AWS_*`, `GOOGLE_*`, `AZURE_*` as in the environment).
    ///
    /// # Errors
    /// As [`check`]; `Invalid` when the options do not suffice.
    pub fn open(
        text: &str,
        allowed: &[String],
        options: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, Error> {
        let url = check(text, allowed)?;
        // names without a prefix mean something to these stores too, and any program may use them
        let own = |name: &str| ["AWS_", "GOOGLE_", "AZURE_"].iter().any(|p| name.to_ascii_uppercase().starts_with(p));
        let (store, prefix) = parse_url_opts(&url, options.into_iter().filter(|(name, _)| own(name))).map_err(|e| {
            Error::invalid(
                "bad_import_source",
                format!("`{url}` cannot be opened with the server's settings"),
                "set the store's credentials and endpoint in the server's environment, for example AWS_ACCESS_KEY_ID",
            )
            .with_inside(e)
        })?;
        Ok(Self { url, prefix, store: Arc::from(store) })
    }

    /// Every object with its name within the source, sorted. Files that begin with `.` or `_` belong to other programs.
    pub(crate) async fn list(&self) -> object_store::Result<Vec<(ObjectMeta, String)>> {
        if let Ok(one) = self.store.head(&self.prefix).await {
            let name = one.location.filename().unwrap_or_default().to_owned();
            return Ok(vec![(one, name)]);
        }
        let mut found = Vec::new();
        let mut all = self.store.list(Some(&self.prefix));
        while let Some(meta) = all.try_next().await? {
            let Some(within) = meta.location.prefix_match(&self.prefix) else { continue };
            let within: Vec<_> = within.map(|part| part.as_ref().to_owned()).collect();
            if within.is_empty() || within.iter().any(|part| part.starts_with(['.', '_'])) {
                continue;
            }
            found.push((meta, within.join("/")));
        }
        found.sort_by(|a, b| a.1.cmp(&b.1));
        Ok(found)
    }

    /// Opens an object: its bytes as a file at their beginning, and the digest of `salt` and the bytes. `folder` takes the
    /// copy of an object that is no local file.
    ///
    /// # Errors
    /// When it cannot be read, or the copy not be written; a text for people.
    pub(crate) async fn fetch(
        &self,
        meta: &ObjectMeta,
        salt: &str,
        folder: &std::path::Path,
    ) -> Result<(File, Digest), String> {
        let got = self.store.get(&meta.location).await.map_err(|e| format!("it cannot be opened: {e}"))?;
        let mut hash = Sha256::new_with_prefix(salt.as_bytes());
        let mut file = match got.payload {
            GetResultPayload::File(mut file, _) => {
                let mut buffer = vec![0; BUFFER];
                loop {
                    let n = file.read(&mut buffer).map_err(|e| format!("it cannot be read: {e}"))?;
                    if n == 0 {
                        break;
                    }
                    hash.update(&buffer[..n]);
                }
                file
            }
            GetResultPayload::Stream(mut bytes) => {
                let mut copy = tempfile::tempfile_in(folder).map_err(|e| format!("no room for a copy: {e}"))?;
                while let Some(part) = bytes.try_next().await.map_err(|e| format!("it cannot be read: {e}"))? {
                    hash.update(&part);
                    copy.write_all(&part).map_err(|e| format!("no room for a copy: {e}"))?;
                }
                copy
            }
        };
        file.seek(SeekFrom::Start(0)).map_err(|e| format!("it cannot be read: {e}"))?;
        Ok((file, Digest(hash.finalize().into())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_lies_below_an_allowed_source_may_be_read() {
        let allowed = ["file:///srv/history".to_owned(), "s3://bucket/old/".to_owned()];
        for good in
            ["file:///srv/history", "file:///srv/history/2025/a.parquet", "s3://bucket/old/x", "s3://bucket/old"]
        {
            assert!(check(good, &allowed).is_ok(), "{good}");
        }
        for outside in [
            "file:///srv/history-of-others/a.parquet",
            "file:///srv/history/../secret",
            "file:///srv/history/%2e%2e/secret",
            "file:///etc/passwd",
            "s3://bucket/older/x",
            "s3://other/old/x",
            "gs://bucket/old/x",
        ] {
            let e = check(outside, &allowed).unwrap_err();
            assert_eq!((e.kind, e.code), (ErrorKind::Forbidden, "import_source_not_allowed"), "{outside}");
        }
        for bad in [
            "history",
            "file:///srv/history/..%2f..%2fetc",
            "s3://key:secret@bucket/old/",
            "s3://bucket/old/?x=1",
            "https://example.com/old/",
            "memory:///srv",
        ] {
            assert_eq!(check(bad, &allowed).unwrap_err().code, "bad_import_source", "{bad}");
        }
        assert!(check("file:///srv/history/a", &[]).unwrap_err().hint.contains("[import] sources"));
    }
}
