//! How one Rust field becomes one Arrow column: its stored type, whether it may be NULL, and how a value is
//! appended. The `table!` macro of [`crate::rows`] builds schemas and encoders from these pieces.

use arrow::array::{
    Array, ArrayBuilder, AsArray as _, BooleanBuilder, Date32Builder, Float32Builder, Float64Builder, Int32Builder,
    Int64Builder, ListBuilder, MapBuilder, MapFieldNames, StringBuilder, TimestampMicrosecondBuilder,
};
use arrow::datatypes::{
    DataType, Date32Type, Field, Fields, Float32Type, Float64Type, Int32Type, Int64Type, TimeUnit,
    TimestampMicrosecondType,
};
use std::borrow::Cow;
use std::sync::Arc;

/// A text as the decoder found it: borrowed from the body unless it had to be changed.
pub type Text<'a> = Cow<'a, str>;

/// Microseconds since the Unix epoch, UTC (the resolution of Delta).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Micros(pub i64);

/// Days since the Unix epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Day(pub i32);

impl From<chrono::DateTime<chrono::Utc>> for Micros {
    fn from(t: chrono::DateTime<chrono::Utc>) -> Self {
        Self(t.timestamp_micros())
    }
}

impl Micros {
    /// The UTC day this moment is in.
    #[must_use]
    pub fn day(self) -> Day {
        Day(i32::try_from(self.0.div_euclid(86_400_000_000)).unwrap_or(i32::MAX))
    }
}

/// A Rust type that is stored as one Arrow column.
pub trait Column {
    type Builder: ArrayBuilder;
    const NULLABLE: bool;
    fn data_type() -> DataType;
    fn builder(rows: usize) -> Self::Builder;
    fn append(&self, to: &mut Self::Builder);
}

macro_rules! plain {
    ($($ty:ty => $builder:ty, $dt:expr, $make:expr, |$v:ident| $get:expr;)+) => {$(
        impl Column for $ty {
            type Builder = $builder;
            const NULLABLE: bool = false;
            fn data_type() -> DataType { $dt }
            fn builder(rows: usize) -> $builder { let f: fn(usize) -> $builder = $make; f(rows) }
            fn append(&self, to: &mut $builder) { let $v = self; to.append_value($get) }
        }
        impl Column for Option<$ty> {
            type Builder = $builder;
            const NULLABLE: bool = true;
            fn data_type() -> DataType { $dt }
            fn builder(rows: usize) -> $builder { <$ty as Column>::builder(rows) }
            fn append(&self, to: &mut $builder) {
                match self { Some(v) => v.append(to), None => to.append_null() }
            }
        }
    )+};
}

impl Column for Text<'_> {
    type Builder = StringBuilder;
    const NULLABLE: bool = false;
    fn data_type() -> DataType {
        DataType::Utf8
    }
    fn builder(rows: usize) -> StringBuilder {
        <String as Column>::builder(rows)
    }
    fn append(&self, to: &mut StringBuilder) {
        to.append_value(self);
    }
}

impl Column for Option<Text<'_>> {
    type Builder = StringBuilder;
    const NULLABLE: bool = true;
    fn data_type() -> DataType {
        DataType::Utf8
    }
    fn builder(rows: usize) -> StringBuilder {
        <String as Column>::builder(rows)
    }
    fn append(&self, to: &mut StringBuilder) {
        to.append_option(self.as_deref());
    }
}

fn utc() -> DataType {
    DataType::Timestamp(TimeUnit::Microsecond, Some("UTC".into()))
}

plain! {
    String => StringBuilder, DataType::Utf8, |n| StringBuilder::with_capacity(n, n * 16), |v| v;
    bool => BooleanBuilder, DataType::Boolean, BooleanBuilder::with_capacity, |v| *v;
    i32 => Int32Builder, DataType::Int32, Int32Builder::with_capacity, |v| *v;
    i64 => Int64Builder, DataType::Int64, Int64Builder::with_capacity, |v| *v;
    f64 => Float64Builder, DataType::Float64, Float64Builder::with_capacity, |v| *v;
    Day => Date32Builder, DataType::Date32, Date32Builder::with_capacity, |v| v.0;
    Micros => TimestampMicrosecondBuilder, utc(),
        |n| TimestampMicrosecondBuilder::with_capacity(n).with_data_type(utc()), |v| v.0;
}

/// Lists use the element name that Delta writes, so that no cast is needed on the way.
fn element(dt: DataType) -> Arc<Field> {
    Arc::new(Field::new("element", dt, true))
}

macro_rules! lists {
    ($($item:ty => $builder:ty, $dt:expr;)+) => {$(
        impl Column for Vec<$item> {
            type Builder = ListBuilder<$builder>;
            const NULLABLE: bool = true;
            fn data_type() -> DataType { DataType::List(element($dt)) }
            fn builder(rows: usize) -> Self::Builder {
                ListBuilder::with_capacity(<$builder>::new(), rows).with_field(element($dt))
            }
            fn append(&self, to: &mut Self::Builder) {
                for v in self { to.values().append_value(*v); }
                to.append(true);
            }
        }
    )+};
}

impl Column for Vec<Text<'_>> {
    type Builder = ListBuilder<StringBuilder>;
    const NULLABLE: bool = true;
    fn data_type() -> DataType {
        DataType::List(element(DataType::Utf8))
    }
    fn builder(rows: usize) -> Self::Builder {
        ListBuilder::with_capacity(StringBuilder::new(), rows).with_field(element(DataType::Utf8))
    }
    fn append(&self, to: &mut Self::Builder) {
        for v in self {
            to.values().append_value(v);
        }
        to.append(true);
    }
}

impl Column for Vec<Option<f64>> {
    type Builder = ListBuilder<Float64Builder>;
    const NULLABLE: bool = true;
    fn data_type() -> DataType {
        <Vec<f64> as Column>::data_type()
    }
    fn builder(rows: usize) -> Self::Builder {
        <Vec<f64> as Column>::builder(rows)
    }
    fn append(&self, to: &mut Self::Builder) {
        for v in self {
            to.values().append_option(*v);
        }
        to.append(true);
    }
}

lists! {
    i32 => Int32Builder, DataType::Int32;
    i64 => Int64Builder, DataType::Int64;
    f32 => Float32Builder, DataType::Float32;
    f64 => Float64Builder, DataType::Float64;
    bool => BooleanBuilder, DataType::Boolean;
}

/// Free-form attributes: key and value text, in order of arrival.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attrs<'a>(pub Vec<(Text<'a>, Text<'a>)>);

impl Attrs<'_> {
    fn fields() -> Fields {
        Fields::from(vec![Field::new("key", DataType::Utf8, false), Field::new("value", DataType::Utf8, true)])
    }
}

impl Column for Attrs<'_> {
    type Builder = MapBuilder<StringBuilder, StringBuilder>;
    const NULLABLE: bool = true;
    fn data_type() -> DataType {
        DataType::Map(Arc::new(Field::new("key_value", DataType::Struct(Self::fields()), false)), false)
    }
    fn builder(rows: usize) -> Self::Builder {
        let names = MapFieldNames { entry: "key_value".into(), key: "key".into(), value: "value".into() };
        MapBuilder::with_capacity(Some(names), StringBuilder::new(), StringBuilder::new(), rows)
    }
    fn append(&self, to: &mut Self::Builder) {
        for (k, v) in &self.0 {
            to.keys().append_value(k);
            to.values().append_value(v);
        }
        // Keys and values were appended in pairs, the only thing `append` checks.
        let ok = to.append(true);
        debug_assert!(ok.is_ok(), "map keys and values differ in number");
    }
}

/// A Rust type that is read back from its column; texts borrow from it.
pub trait Readable<'a>: Column + Default {
    /// The value at `row`; the default of what is NULL.
    fn read(column: &'a dyn Array, row: usize) -> Self;
}

macro_rules! readable {
    ($($ty:ty: |$c:ident, $row:ident| $get:expr;)+) => {$(
        impl<'a> Readable<'a> for Option<$ty> {
            fn read($c: &'a dyn Array, $row: usize) -> Self {
                if $c.is_null($row) { None } else { $get }
            }
        }
        impl<'a> Readable<'a> for $ty {
            fn read(column: &'a dyn Array, row: usize) -> Self {
                <Option<$ty> as Readable<'a>>::read(column, row).unwrap_or_default()
            }
        }
    )+};
}

readable! {
    Text<'a>: |c, row| c.as_string_opt::<i32>().map(|a| a.value(row).into());
    String: |c, row| c.as_string_opt::<i32>().map(|a| a.value(row).into());
    bool: |c, row| c.as_boolean_opt().map(|a| a.value(row));
    i32: |c, row| c.as_primitive_opt::<Int32Type>().map(|a| a.value(row));
    i64: |c, row| c.as_primitive_opt::<Int64Type>().map(|a| a.value(row));
    f64: |c, row| c.as_primitive_opt::<Float64Type>().map(|a| a.value(row));
    Day: |c, row| c.as_primitive_opt::<Date32Type>().map(|a| Day(a.value(row)));
    Micros: |c, row| c.as_primitive_opt::<TimestampMicrosecondType>().map(|a| Micros(a.value(row)));
}

/// The elements of the list at `row`; none of NULL.
fn elements(column: &dyn Array, row: usize) -> Option<(&dyn Array, std::ops::Range<usize>)> {
    let list = column.as_list_opt::<i32>().filter(|list| list.is_valid(row))?;
    let offsets = list.value_offsets();
    let at = |i: usize| usize::try_from(offsets[i]).unwrap_or_default();
    Some((list.values().as_ref(), at(row)..at(row + 1)))
}

macro_rules! readable_lists {
    ($($item:ty: |$c:ident| $array:expr;)+) => {$(
        impl<'a> Readable<'a> for Vec<$item> {
            fn read(column: &'a dyn Array, row: usize) -> Self {
                let Some(($c, places)) = elements(column, row) else { return Vec::new() };
                let Some(array) = $array else { return Vec::new() };
                places.map(|i| if array.is_null(i) { Default::default() } else { array.value(i).into() }).collect()
            }
        }
    )+};
}

readable_lists! {
    Text<'a>: |c| c.as_string_opt::<i32>();
    i32: |c| c.as_primitive_opt::<Int32Type>();
    f32: |c| c.as_primitive_opt::<Float32Type>();
    bool: |c| c.as_boolean_opt();
}

impl<'a> Readable<'a> for Attrs<'a> {
    fn read(column: &'a dyn Array, row: usize) -> Self {
        let Some(map) = column.as_map_opt().filter(|map| map.is_valid(row)) else { return Self::default() };
        let texts = (map.keys().as_string_opt::<i32>(), map.values().as_string_opt::<i32>());
        let (Some(keys), Some(values)) = texts else { return Self::default() };
        let at = |i: usize| usize::try_from(map.value_offsets()[i]).unwrap_or_default();
        let pair = |i: usize| values.is_valid(i).then(|| (keys.value(i).into(), values.value(i).into()));
        Self((at(row)..at(row + 1)).filter_map(pair).collect())
    }
}
